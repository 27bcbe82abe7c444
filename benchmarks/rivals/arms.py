"""The proxies that are compared: how each is started, and what its own record holds afterwards."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bridle.bench.proxy import RECOMMENDED_ALLOCATOR, free_port, rss_mb
from bridle.bench.rivals.engine import number_in
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus

HERE: Final = Path(__file__).parent
INSTALL: Final = "benchmarks/rivals/install"
_START_S: Final = 180.0
PLAIN: Final = "plain"
PRIMED: Final = "primed"
"""A vLLM that primes its detokenizer with the prompt's tail alone (``prime_with_tail``)."""

Recorded = Iterator[tuple[str, Sequence[int]]]
"""The text and the sampled ids of each call that a record holds; no ids if it has none."""


@dataclass(frozen=True, slots=True)
class Place:
    """The engine, the model and the folder that an arm is started with."""

    engine: str
    """Base URL of the engine, without ``/v1``."""
    model: str
    """Name of the model that the engine serves."""
    tokenizer: Path
    """The model's directory."""
    folder: Path
    """A folder of the arm's own, for its record and its log."""
    port: int


@dataclass(frozen=True, slots=True)
class Arm:
    """A way from the client to the engine."""

    name: str
    what: str
    """A description of it and its settings, for the page."""
    command: Callable[[Place], list[str]] | None = None
    """The command that starts it; ``None`` for the engine itself."""
    path: str = "/v1"
    """The base path for clients; it may contain ``{session}``."""
    health: str = "/v1/models"
    engine: str = PLAIN
    """The engine behind it: :data:`PLAIN` or :data:`PRIMED`."""
    distribution: str = ""
    """The distribution in its environment, if it is not part of Bridle."""
    environment: Callable[[Place], dict[str, str]] = lambda _: {}
    recorded: Callable[[Place], Recorded] | None = None
    """Reads its record after it has ended; ``None`` if it keeps none."""

    @property
    def own_environment(self) -> Path | None:
        """The virtual environment that it needs, or ``None`` if it is part of Bridle."""
        return HERE / self.name / ".venv" if self.distribution else None

    @property
    def installed(self) -> bool:
        own = self.own_environment
        return own is None or (own / ".installed").exists()

    def version(self) -> str:
        from importlib.metadata import version

        own = self.own_environment
        if own is None:
            return "" if self.command is None else version("bridle-rl")
        code = f"from importlib.metadata import version; print(version({self.distribution!r}))"
        done = subprocess.run(
            [own / "bin/python", "-c", code], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()


@dataclass
class Running:
    """An arm that serves."""

    url: str
    """The base URL with ``/v1``; it may contain ``{session}``."""
    pid: int | None = None
    peak_rss_mb: float = field(default=0.0)

    def take_rss(self) -> None:
        """Note the memory of the process and its children, if it is more than before."""
        if self.pid is not None:
            held = sum(rss_mb(pid) for pid in _family(self.pid))
            self.peak_rss_mb = max(self.peak_rss_mb, held)


class ArmFailed(RuntimeError):
    """An arm did not start; the message ends with the end of its log."""


@contextmanager
def running(arm: Arm, place: Place, pinned: Callable[[], None] | None) -> Iterator[Running]:
    """Start the arm and wait until it serves. Raise :class:`ArmFailed` if it does not."""
    if arm.command is None:
        yield Running(f"{place.engine}{arm.path}")
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    log = place.folder / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            arm.command(place),
            stdout=output,
            stderr=output,
            env={**os.environ, **RECOMMENDED_ALLOCATOR, **arm.environment(place)},
            cwd=place.folder,
            start_new_session=True,
            preexec_fn=pinned,
        )
    base = f"http://127.0.0.1:{place.port}"
    try:
        _wait(base + arm.health, process, arm, log)
        yield Running(base + arm.path, process.pid)
    finally:
        _end(process)


def _wait(url: str, process: subprocess.Popen[bytes], arm: Arm, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    asked = urllib.request.Request(url, headers={"authorization": "Bearer bench"})  # noqa: S310
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(asked, timeout=2):  # noqa: S310 - our own loopback
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    tail = log.read_text(errors="replace")[-2000:]
    raise ArmFailed(f"{arm.name} did not start:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    own = children.read_text().split() if children.exists() else []
    return [pid, *(one for child in own for one in _family(int(child)))]


# -- Bridle --------------------------------------------------------------------------------------


def _bridle(*further: str, tokenizer: bool = False) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        given = ["--tokenizer", str(place.tokenizer)] if tokenizer else []
        store = ["--store", str(place.folder / "bridle.db"), "--port", str(place.port)]
        module = [sys.executable, "-m", "bridle", "proxy", "--upstream", place.engine]
        return [*module, *store, *given, *further]

    return command


def _of_bridle(place: Place) -> Recorded:
    with Reader(str(place.folder / "bridle.db")) as reader:
        for session in reader.sessions():
            for call in reader.calls(session.id):
                trusted = call.status is CallStatus.COMPLETE
                choices = reader.sampled(call.id) if trusted else ()
                ids = choices[0].token_ids.tolist() if choices else []
                yield reader.response_body(call.id).decode(), ids


# -- others --------------------------------------------------------------------------------------


def _program(name: str, program: str, *arguments: str) -> list[str]:
    return [str(HERE / name / ".venv" / "bin" / program), *arguments]


def _rllm(place: Place) -> list[str]:
    given = ["--worker", f"{place.engine}/v1", "--db-path", str(place.folder / "traces.db")]
    given += ["--host", "127.0.0.1", "--port", str(place.port), "--log-level", "WARNING"]
    return _program("rllm", "rllm-model-gateway", *given)


def _of_rllm(place: Place) -> Recorded:
    with closing(sqlite3.connect(place.folder / "traces.db")) as store:
        for (data,) in store.execute("SELECT data FROM traces"):
            trace = json.loads(data)
            text = trace["response_message"].get("content") or ""
            yield text, trace["completion_token_ids"]


def _litellm(place: Place) -> list[str]:
    asked: dict[str, Any] = {
        "model": f"hosted_vllm/{place.model}",
        "api_base": f"{place.engine}/v1",
    }
    # LiteLLM asks for no token ids by itself; a recorder behind it could only have them with this.
    asked |= {"api_key": "bench", "extra_body": {"return_token_ids": True, "logprobs": True}}
    settings = {
        "model_list": [{"model_name": place.model, "litellm_params": asked}],
        "litellm_settings": {"callbacks": "recorder.recorder", "telemetry": False},
    }
    config = place.folder / "config.yaml"
    config.write_text(json.dumps(settings))
    (place.folder / "recorder.py").write_bytes((HERE / "litellm" / "recorder.py").read_bytes())
    given = ["--config", str(config), "--host", "127.0.0.1", "--port", str(place.port)]
    return _program("litellm", "litellm", *given)


def _litellm_environment(place: Place) -> dict[str, str]:
    record = str(place.folder / "record.jsonl")
    return {
        "RIVALS_RECORD": record,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        # Without a key it starts only with this; it listens on loopback and has no secret.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }


def _of_litellm(place: Place) -> Recorded:
    record = place.folder / "record.jsonl"
    for line in record.read_text().splitlines() if record.exists() else ():
        choice = json.loads(line)["choices"][0]
        yield choice["message"].get("content") or "", _ids_in(choice)


def _ids_in(choice: Mapping[str, Any]) -> list[int]:
    """Return the sampled ids of a choice, wherever LiteLLM may keep a field unknown to it."""
    message = choice["message"]
    for where in (choice, message):
        kept = where.get("provider_specific_fields") or {}
        if ids := where.get("token_ids") or kept.get("token_ids"):
            return list(ids)
    return []


def _mitmproxy(place: Place) -> list[str]:
    given = ["--mode", f"reverse:{place.engine}", "--listen-host", "127.0.0.1", "--quiet"]
    given += ["--listen-port", str(place.port), "--set", "stream_large_bodies=1"]
    given += ["--set", f"confdir={place.folder}", "--set", "connection_strategy=lazy"]
    return _program("mitmproxy", "mitmdump", *given)


DIRECT: Final = "direct"
ARMS: Final = (
    Arm(DIRECT, "the engine itself"),
    Arm(
        "bridle",
        "exact continuation: `--tokenizer`, SQLite",
        _bridle(tokenizer=True),
        path="/s/{session}/v1",
        health="/healthz",
        recorded=_of_bridle,
    ),
    Arm(
        "bridle-primed",
        "the same, in front of a vLLM with `prime_with_tail`",
        _bridle(tokenizer=True),
        path="/s/{session}/v1",
        health="/healthz",
        engine=PRIMED,
        recorded=_of_bridle,
    ),
    Arm(
        "bridle-rendered",
        "the engine renders every prompt; ids and logprobs are recorded, SQLite",
        _bridle("--set", "continuation=rendered"),
        path="/s/{session}/v1",
        health="/healthz",
        recorded=_of_bridle,
    ),
    Arm(
        "bridle-external",
        "`--external`: text alone is recorded, SQLite",
        _bridle("--external"),
        path="/s/{session}/v1",
        health="/healthz",
        recorded=_of_bridle,
    ),
    Arm(
        "rllm",
        "rLLM's model gateway, its defaults: SQLite",
        _rllm,
        path="/sessions/{session}/v1",
        health="/health",
        distribution="rllm-model-gateway",
        recorded=_of_rllm,
    ),
    Arm(
        "litellm",
        "LiteLLM's proxy, one worker; a custom logger writes each response to a file; what LiteLLM "
        "hands to a logger has no token ids",
        _litellm,
        health="/health/liveliness",
        distribution="litellm",
        environment=_litellm_environment,
        recorded=_of_litellm,
    ),
    Arm(
        "mitmproxy",
        "a plain reverse proxy that streams bodies; it keeps nothing",
        _mitmproxy,
        distribution="mitmproxy",
    ),
)
"""The engine itself first; the others are compared with it."""


def place_of(arm: Arm, engine: str, model: str, tokenizer: Path, folder: Path) -> Place:
    return Place(engine, model, tokenizer, folder / arm.name, free_port())


def recorded_calls(arm: Arm, place: Place) -> Iterator[tuple[int | None, Sequence[int]]]:
    """Yield each call of the arm's record: the number of the engine's reply, and the ids."""
    for text, ids in arm.recorded(place) if arm.recorded else ():
        yield number_in(text), ids
