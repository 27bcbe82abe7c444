"""One session of thousands of calls through a recording proxy: processor time of a call by length.

A made-up agent calls a tool in every turn, and sends its whole history with every call, as agents
do. Proxy, engine (``bridle/bench/echo.py``) and agent are processes of their own; the processor
time is that of all threads of the proxy, so it covers reading, lineage, continuation, the engine's
request and reply, and the record.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from bridle.bench.echo import ARGUMENTS, MODEL, SAID, TOOL
from bridle.bench.proxy import cpu_seconds, proxy_process, recording_proxy, rss_mb
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

CALLS: Final = (250, 500, 1000, 2000)
WINDOW: Final = 50
"""Number of calls up to each of the lengths over which the mean is taken."""
_RESULT_CHARACTERS: Final = 1900
"""Characters of a tool's result, about 450 tokens of source code."""
_CALL_ID: Final = re.compile(rb'"id":"(call_[a-z2-7]{24}\d\d)"')
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Read a part of a file of the workspace.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


def measure(
    calls: Sequence[int] = CALLS, *, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return the milliseconds of processor time of a call after so many ``calls``, by their number.

    ``body_bytes`` and ``prompt_tokens`` are those of the last call of each.
    """
    texts = _texts()
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridle-bench-")))
        train_tokenizer(folder / "model", texts[::8], vocab_size=8192)
        engine = stack.enter_context(_engine(folder / "model"))
        module = [*recording_proxy(folder / "long.db"), "--tokenizer", str(folder / "model")]
        process, url = stack.enter_context(proxy_process(engine, module, None))
        agent = Agent(url, texts)
        for number in range(1, max(calls) + 1):
            if number + WINDOW - 1 in calls:
                before = cpu_seconds(process.pid)
            agent.call()
            if number in calls:
                used = cpu_seconds(process.pid) - before
                report[str(number)] = {
                    "cpu_ms": round(1000 * used / WINDOW, 2),
                    "body_bytes": agent.body_bytes,
                    "prompt_tokens": agent.prompt_tokens,
                    "rss_mb": round(rss_mb(process.pid)),
                }
                progress(f"{number} calls: {report[str(number)]}")
    return report


@contextmanager
def _engine(model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "bridle.bench.echo", str(model)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@dataclass
class Agent:
    """A client whose history only grows. It builds bodies by appending, so it costs little."""

    url: str
    texts: Sequence[str]
    body_bytes: int = 0
    prompt_tokens: int = 0
    session: str = "long"
    _pieces: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        at = urlsplit(self.url)
        self._connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=120)
        self._texts = cycle(self.texts)
        self._tools = json.dumps(_TOOLS).encode()
        self._add("system", content="You are a careful engineer. Read before you write.")
        self._add("user", content="Find out how the standard library opens files.")

    def call(self) -> None:
        """Make one call, and append its reply and a tool's result to the history.

        Raise ``RuntimeError`` if it fails.
        """
        body = b'{"model":"%b","messages":[%b],"tools":%b,"stream":true}' % (
            MODEL.encode(),
            b",".join(self._pieces),
            self._tools,
        )
        self.body_bytes = len(body)
        headers = {"content-type": "application/json", "authorization": "Bearer bench"}
        path = f"/s/{self.session}/v1/chat/completions"
        self._connection.request("POST", path, body, headers)
        reply = self._connection.getresponse()
        answer = reply.read()
        if reply.status != 200 or (made := _CALL_ID.search(answer)) is None:
            raise RuntimeError(f"the call failed: {answer[:500]!r}")
        call_id = made[1].decode()
        function = {"name": TOOL, "arguments": ARGUMENTS}
        called = {"id": call_id, "type": "function", "function": function}
        self._add("assistant", content=SAID, tool_calls=[called])
        self._add("tool", tool_call_id=call_id, content=next(self._texts))

    def _add(self, role: str, **fields: Any) -> None:
        self._pieces.append(json.dumps({"role": role, **fields}, separators=(",", ":")).encode())


def _texts() -> list[str]:
    """Return pieces of the standard library's source code, as tools print them."""
    folder = Path(json.__file__).parents[1]
    source = "".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")))
    return [
        source[at : at + _RESULT_CHARACTERS]
        for at in range(0, len(source) - _RESULT_CHARACTERS, _RESULT_CHARACTERS)
    ]


if __name__ == "__main__":
    print(json.dumps(measure(progress=lambda line: print(line, file=sys.stderr)), indent=1))
