"""An engine that costs next to nothing at any length of a prompt: it returns the ids it was sent.

``python -m bridle.bench.echo MODEL`` prints its port and serves until it is ended. The prompt of an
exact continuation is neither decoded nor encoded: its text is copied from the request to the reply.
Other prompts are rendered with the model directory's own tokenizer. Every reply is streamed, says
one sentence and calls a tool.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import uvloop

from bridle.bench.upstream import Upstream, serve
from bridle.engine.contract.tokenizer import Tokenizer

MODEL: Final = "policy"
ARGUMENTS: Final = '{"path": "lib.py"}'
SAID: Final = "Let me read on."
TOOL: Final = "read_file"
_MARKUP: Final = (
    f'{SAID}\n<tool_call>\n{{"name": "{TOOL}", "arguments": {ARGUMENTS}}}\n</tool_call>'
)
_KEY: Final = b'"prompt_token_ids":['
_LIMIT: Final = 1 << 20


class _Engine:
    """The model's side: prompts and the reply that is always the same."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer(model)
        ids = [*self.tokenizer.encode(_MARKUP), *self.tokenizer.eos_token_ids]
        self._sampled = orjson.dumps(ids)
        entry = {"token": "x", "logprob": -0.25, "bytes": None, "top_logprobs": []}
        self._logprobs = orjson.dumps({"content": [entry] * len(ids)})
        self._calls = 0

    def reply(self, path: str, body: bytes) -> bytes:
        if not body:
            card = {"id": MODEL, "object": "model", "max_model_len": _LIMIT}
            return _whole(orjson.dumps({"object": "list", "data": [card]}))
        if path.endswith("/tokenize"):
            asked = orjson.loads(body)
            ids = self._rendered(asked)
            return _whole(orjson.dumps({"tokens": ids, "count": len(ids), "max_model_len": _LIMIT}))
        return self._stream(body)

    def _stream(self, body: bytes) -> bytes:
        self._calls += 1
        start = body.rfind(_KEY)
        if start < 0:
            prompt = orjson.dumps(self._rendered(orjson.loads(body)))
        else:
            start += len(_KEY) - 1
            prompt = body[start : body.index(b"]", start) + 1]
        head = b'"id":"chatcmpl-%d","model":"%b"' % (self._calls, MODEL.encode())
        call = {
            "index": 0,
            "id": f"call-{self._calls}",
            "function": {"name": TOOL, "arguments": ARGUMENTS},
        }
        delta = orjson.dumps({"role": "assistant", "content": SAID, "tool_calls": [call]})
        choice = b'"index":0,"delta":%b,"token_ids":%b,"logprobs":%b,"finish_reason":"tool_calls"'
        count = prompt.count(b",") + 1
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (
            count,
            self._sampled.count(b",") + 1,
        )
        events = (
            b'{%b,"choices":[],"prompt_token_ids":%b}' % (head, prompt),
            b'{%b,"choices":[{%b}]}' % (head, choice % (delta, self._sampled, self._logprobs)),
            b'{%b,"choices":[],"usage":%b}' % (head, usage),
            b"[DONE]",
        )
        return _answer(b"".join(b"data: %b\n\n" % event for event in events), b"text/event-stream")

    def _rendered(self, asked: dict[str, Any]) -> list[int]:
        text = self.tokenizer.render(asked["messages"], asked.get("tools"))
        return self.tokenizer.encode(text)


def _whole(body: bytes) -> bytes:
    return _answer(body, b"application/json")


def _answer(body: bytes, kind: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


class _Connection(Upstream):
    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    def on_url(self, url: bytes) -> None:
        self._path = url.decode()

    def on_message_complete(self) -> None:
        self._transport.write(self._engine.reply(self._path, b"".join(self._body)))


if __name__ == "__main__":
    uvloop.run(serve(partial(_Connection, _Engine(Path(sys.argv[1])))))
