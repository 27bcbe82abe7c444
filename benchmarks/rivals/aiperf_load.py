"""AIPerf as the load: NVIDIA's client leads the same sessions, and its own figures are taken.

AIPerf gives each session no URL of its own, so that all sessions of a load have one URL.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bridle.bench.rivals.sessions import SessionLoad, SessionTimes, source_texts, text_of

HERE: Final = Path(__file__).parent / "aiperf"
PROGRAM: Final = HERE / ".venv" / "bin" / "aiperf"
INSTALL: Final = "benchmarks/rivals/install aiperf"
_REPORT: Final = "profile_export_aiperf.json"


class AiperfFailed(RuntimeError):
    """AIPerf ended without a report; the message ends with the end of its output."""


def aiperf_version() -> str:
    asked = [str(PROGRAM), "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def lead(
    load: SessionLoad, tokenizer: Path, folder: Path, pinned: Callable[[], None] | None
) -> SessionTimes:
    """Lead the sessions of ``load`` and return AIPerf's figures.

    ``tokenizer`` is a directory that it can load; what it counts with it is not used. Raise
    :class:`AiperfFailed`.
    """
    folder.mkdir(parents=True)
    conversations = _conversations(load)
    dataset = folder / "sessions.jsonl"
    dataset.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in conversations))
    url = urlsplit(load.url.replace("{session}", load.name))
    command: list[str | Path] = [PROGRAM, "profile", "--model", load.model, "--streaming"]
    command += ["--url", f"{url.scheme}://{url.netloc}", "--endpoint-type", "chat"]
    command += ["--custom-endpoint", f"{url.path}/chat/completions", "--api-key", load.api_key]
    command += ["--input-file", dataset, "--custom-dataset-type", "multi_turn"]
    command += ["--conversation-num", str(len(conversations))]
    command += ["--concurrency", str(load.concurrency), "--use-server-token-count"]
    command += ["--tokenizer", tokenizer, "--extra-inputs", orjson.dumps(load.fields).decode()]
    command += ["--output-artifact-dir", folder, "--export-level", "summary", "--ui", "none"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        preexec_fn=pinned,
    )
    if done.returncode or not (folder / _REPORT).exists():
        raise AiperfFailed(f"AIPerf ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return times_in(orjson.loads((folder / _REPORT).read_bytes()))


def _conversations(load: SessionLoad) -> list[dict[str, Any]]:
    texts = source_texts()
    opening = "".join(texts)[: load.opening]
    grown = cycle(texts)
    return [
        {
            "session_id": f"{load.name}-{number}",
            "turns": [
                {"text": f"{opening}\nSession {load.name}-{number}."},
                *({"text": text_of(grown, load.growth)} for _ in range(load.turns - 1)),
            ],
        }
        for number in range(load.concurrency * load.sessions)
    ]


def times_in(report: Mapping[str, Any]) -> SessionTimes:
    """Return what AIPerf's JSON report holds of a load."""
    calls = int(report["request_count"]["avg"]) if "request_count" in report else 0
    failed = sum(error["count"] for error in report["error_summary"])
    if not calls:
        return SessionTimes(failed=failed, error=str(report["error_summary"][:1]))
    return SessionTimes(
        calls=calls,
        failed=failed,
        seconds=report["benchmark_duration"]["avg"],
        first_ms=_percentiles(report["time_to_first_token"]),
        between_ms=_percentiles(report["inter_chunk_latency"]),
        body_kb=_percentiles(report["http_req_data_sent"]),
        sampled=int(report["total_output_tokens"]["avg"]),
        error=str(report["error_summary"][0]) if failed else "",
    )


def _percentiles(metric: Mapping[str, float]) -> tuple[float, float]:
    return metric["p50"], metric["p99"]
