"""Errors in the middle of a stream, judged by the retry patterns of the installed programs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from bridle.harnesses.install import NODE, find_harness
from bridle.proxy.dialects.errors import anthropic_stream_error, midway, openai_error_object
from bridle.proxy.wire.canonical import ApiError

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
