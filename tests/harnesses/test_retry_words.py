"""Errors in the middle of a stream, judged by the retry patterns of the installed programs."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.install import NODE, find_harness
from bridle.proxy.dialects.errors import anthropic_stream_error, midway, openai_error_object
from bridle.proxy.dialects.registry import GOOGLE, RESPONSES
from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    TextDelta,
    ToolCallDelta,
    Usage,
)

pytestmark = pytest.mark.harness

MORE = NODE / "more/node_modules"
FAULTS = [
    ApiError("upstream_error", "the engine's connection broke in the reply", status=502),
    ApiError("upstream_timeout", "the engine did not answer in time", status=504),
    ApiError("overloaded", "the policy is being replaced", status=503),
    ApiError("store_unavailable", "the call cannot be stored", status=503),
    ApiError("internal", "an error of the proxy", status=500),
]
REFUSED = ApiError("invalid_request", "no such tool", status=400)


def found_in(paths: list[Path], pattern: bytes) -> bytes:
    """The first text in the files that matches; the pattern's group, if it has one."""
    for path in paths:
        if (match := re.search(pattern, path.read_bytes())) is not None:
            return match[match.lastindex or 0]
    raise AssertionError(f"{pattern!r} is in none of {paths}: the program decides otherwise now")


def judged(script: str, messages: list[str]) -> list[bool]:
    """The verdicts that a JavaScript expression of ``message`` gives."""
    program = f"const given = {json.dumps(messages)};\n{script}"
    done = subprocess.run(
        [find_harness("node"), "--input-type=module", "-e", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [bool(one) for one in json.loads(done.stdout)]


def messages() -> list[str]:
    """The messages of all faults, and last that of a refusal."""
    return [str(openai_error_object(midway(one))["message"]) for one in [*FAULTS, REFUSED]]


def test_pi_retries_them() -> None:
    source = MORE / "@earendil-works/pi-ai/dist/utils/retry.js"
    script = f"""
        const {{ isRetryableAssistantError }} = await import({json.dumps(source.as_uri())});
        const ask = (errorMessage) => isRetryableAssistantError({{
            role: "assistant", stopReason: "error", errorMessage, content: [] }});
        console.log(JSON.stringify(given.map(ask)));
    """
    assert judged(script, messages()) == [True] * len(FAULTS) + [False]


def test_opencode_retries_them() -> None:
    binaries = sorted(MORE.glob("opencode-*/bin/opencode"))
    patterns = found_in(binaries, rb"=(\[/429\|500\|502[^;]*?/i\])[;,]").decode()
    script = f"""
        const patterns = {patterns};
        console.log(JSON.stringify(given.map((one) => patterns.some((re) => re.test(one)))));
    """
    assert judged(script, messages()) == [True] * len(FAULTS) + [False]


def test_qwen_code_retries_errors_without_a_status_whatever_they_say() -> None:
    chunks = sorted((MORE / "@qwen-code/qwen-code/chunks").glob("*.js"))
    rule = rb"isRetryableStatuslessUpstreamError\(classification\) \{\s*return ([^;]*);"
    assert found_in(chunks, rule) == b'classification.reason === "upstream-error-without-status"'


def test_claude_code_retries_overloaded_events() -> None:
    binaries = sorted((NODE / "node_modules/@anthropic-ai").glob("claude-code-*/claude"))
    words = found_in(
        binaries, rb"""message\?\.includes\('("type":"overloaded_error")'\)"""
    ).decode()
    for fault in FAULTS:
        event = json.dumps(anthropic_stream_error(midway(fault)), separators=(",", ":"))
        assert words in event
    assert words not in json.dumps(anthropic_stream_error(REFUSED), separators=(",", ":"))


Answer = Callable[[int], bytes]
"""A function from the number of a request for a stream, from 0, to the stream."""


@contextmanager
def served(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """A server of streams: its URL, and the paths that were asked for a stream."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            stream = b'"stream":true' in body or "stream" in self.path
            self.send_response(200 if stream else 404)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            if stream:
                asked.append(self.path)
                self.wfile.write(answer(len(asked) - 1))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def streamed(dialect: Any, events: Sequence[Event], failure: ApiError | None = None) -> bytes:
    """A stream of the proxy's with these events, which ends with a failure if there is one."""
    body = {"model": "m", "input": "hi", "contents": "hi", "stream": True}
    path = {"model": "m", "method": "streamGenerateContent"}
    request = dialect.parse(json.dumps(body).encode(), path, {"alt": "sse"})
    emitter = dialect.emitter(request, dialect.mint("call_" + "a" * 24, 1, "m"))
    pieces = [emitter.begin(), *map(emitter.event, events)]
    pieces.append(emitter.end() if failure is None else emitter.fail(midway(failure)))
    return b"".join(pieces)


DONE: list[Event] = [TextDelta("done"), Finished("stop"), Usage(1, 1)]


def codex_says(answer: Answer, home: Path) -> tuple[str, int]:
    """Codex's output, and the number of its requests."""
    with served(answer) as (url, asked):
        config = ['model = "m"', 'model_provider = "b"', "[model_providers.b]", 'name = "b"']
        config += [f'base_url = "{url}/v1"', 'wire_api = "responses"', 'env_key = "K"']
        (home / "config.toml").write_text("\n".join(config))
        done = subprocess.run(
            [find_harness("codex"), "exec", "--skip-git-repo-check", "hi"],
            env={**os.environ, "CODEX_HOME": str(home), "K": "x"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=home,
            check=False,
        )
        return done.stdout.strip(), len(asked)


def test_codex_retries_them(tmp_path: Path) -> None:
    """Codex is a binary whose rules are not text, so that it is run; it retries five times."""

    def answer(number: int) -> bytes:
        return streamed(RESPONSES, [TextDelta("half")], FAULTS[number])

    def at_last(number: int) -> bytes:
        return answer(number) if number < len(FAULTS) else streamed(RESPONSES, DONE)

    assert codex_says(at_last, tmp_path) == ("done", len(FAULTS) + 1)


def test_codex_does_not_repeat_a_refusal(tmp_path: Path) -> None:
    assert codex_says(lambda _: streamed(RESPONSES, [], REFUSED), tmp_path) == ("", 1)


def test_gemini_cli_retries_them_after_a_tools_result(tmp_path: Path) -> None:
    """It takes a stream without an end for a whole reply after a result."""
    call = ToolCallDelta(0, "call_1", "list_directory", '{"dir_path": "."}')

    def answer(number: int) -> bytes:
        if number == 0:
            return streamed(GOOGLE, [call, Finished("tool_calls"), Usage(1, 1)])
        if number == 1:
            return streamed(GOOGLE, [TextDelta("half")], FAULTS[2])
        return streamed(GOOGLE, DONE)

    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    settings |= {"model": {"name": "gemini-2.5-pro"}, "privacy": {"usageStatisticsEnabled": False}}
    (tmp_path / ".gemini").mkdir()
    (tmp_path / ".gemini/settings.json").write_text(json.dumps(settings))
    environment = {"GEMINI_CLI_HOME": str(tmp_path), "GEMINI_API_KEY": "x"}
    environment |= {"GEMINI_CLI_TRUST_WORKSPACE": "true"}
    with served(answer) as (url, asked):
        done = subprocess.run(
            [find_harness("gemini"), "-p", "list the files"],
            env={**os.environ, **environment, "GOOGLE_GEMINI_BASE_URL": url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            check=False,
        )
    assert (len(asked), done.stdout.strip().endswith("done")) == (3, True), done.stderr
