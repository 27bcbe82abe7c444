"""An engine that costs little at any length of a prompt, whose replies can be checked in a record.

``python -m bridle.bench.rivals.engine MODEL TOKENS GAP_MS`` prints its port and serves until it is
ended. A reply has ``TOKENS`` tokens, one event each, ``GAP_MS`` apart. Its text begins with the
reply's number, from which its token ids follow (:func:`sampled_ids`), so that whoever has the text
and the ids of a call can be checked without a second record.

As vLLM does, it reports token ids and logprobs only to a request that asks for them. A request with
token ids gets those back as the prompt's. The prompt of a session's first call is rendered with the
tokenizer of ``MODEL``. Prompts of later calls with messages have made-up ids of a plausible number:
rendering them is the engine's work, and here the proxies are measured.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import uvloop

from bridle.bench.upstream import Upstream, serve
from bridle.engine.contract.tokenizer import Tokenizer

MODEL: Final = "policy"
_LIMIT: Final = 1 << 20
_PIECE: Final = " four"
_NUMBER: Final = re.compile(r"Reply (\d+):")
_FIRST_ID: Final = 512
"""The lowest id that a reply has; special tokens and single bytes are below it."""
_IDS: Final = 4096
_BYTES_PER_TOKEN: Final = 4
_STREAMED: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def sampled_ids(number: int, count: int) -> list[int]:
    """Return the ``count`` token ids of reply ``number``, without the end of the turn."""
    return [_FIRST_ID + (number * 7919 + at * 104_729) % _IDS for at in range(count)]


def number_in(text: str) -> int | None:
    """Return the number of the reply that ``text`` holds, or ``None`` if it holds none."""
    found = _NUMBER.search(text)
    return int(found[1]) if found else None


class Engine:
    """The model's side: prompts, and replies that count up."""

    def __init__(self, model: Path, tokens: int) -> None:
        self._tokenizer = Tokenizer(model)
        self._end = min(self._tokenizer.eos_token_ids)
        self._tokens = tokens
        self._calls = 0

    def whole(self, path: str, body: bytes) -> bytes:
        """Return the answer to a request that is no call."""
        if path.endswith("/tokenize"):
            ids = self._rendered(orjson.loads(body))
            return _whole({"tokens": ids, "count": len(ids), "max_model_len": _LIMIT})
        card = {"id": MODEL, "object": "model", "max_model_len": _LIMIT}
        return _whole({"object": "list", "data": [card]})

    def events(self, body: bytes) -> Iterator[bytes]:
        """Yield the events of a call: one for each token, the last with the usage as well."""
        self._calls += 1
        number, asked = self._calls, orjson.loads(body)
        given = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids")
        with_ids, with_logprobs = asked.get("return_token_ids"), asked.get("logprobs")
        prompt = given or range(len(body) // _BYTES_PER_TOKEN)
        if with_ids and not given:
            prompt = self._prompt(asked, len(prompt))
        head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1}
        head["model"] = MODEL
        ids = [*sampled_ids(number, self._tokens - 1), self._end]
        for at, token in enumerate(ids):
            last = at == len(ids) - 1
            text = "" if last else _PIECE if at else f"Reply {number}:"
            delta = {"content": text} if at else {"role": "assistant", "content": text}
            choice: dict[str, Any] = {"index": 0, "delta": delta}
            choice["finish_reason"] = "stop" if last else None
            if with_ids:
                choice["token_ids"] = [token]
            if with_logprobs:
                entry = {"token": text, "logprob": -0.25, "bytes": None, "top_logprobs": []}
                choice["logprobs"] = {"content": [entry]}
            event: dict[str, Any] = {**head, "choices": [choice]}
            if with_ids and not at:
                event["prompt_token_ids"] = prompt
            yield b"data: %b\n\n" % orjson.dumps(event)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        usage["total_tokens"] = len(prompt) + len(ids)
        yield b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(
            {**head, "choices": [], "usage": usage}
        )

    def _prompt(self, asked: dict[str, Any], count: int) -> list[int]:
        if any(message["role"] == "assistant" for message in asked["messages"]):
            return [_FIRST_ID + at % _IDS for at in range(count)]
        return self._rendered(asked)

    def _rendered(self, asked: dict[str, Any]) -> list[int]:
        text = self._tokenizer.render(asked["messages"], asked.get("tools"))
        return self._tokenizer.encode(text)


def _whole(data: dict[str, Any]) -> bytes:
    body = orjson.dumps(data)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class _Connection(Upstream):
    def __init__(self, engine: Engine, gap_s: float) -> None:
        self._engine = engine
        self._gap_s = gap_s
        self._path = ""

    def on_url(self, url: bytes) -> None:
        self._path = url.decode()

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        if not self._path.endswith("/chat/completions"):
            self._transport.write(self._engine.whole(self._path, body))
            return
        self._events = self._engine.events(body)
        self._transport.write(_STREAMED)
        self._send(asyncio.get_running_loop().time())

    def _send(self, due: float) -> None:
        """Write the next event, and the one after it at a time that lateness does not move."""
        if self._transport.is_closing():
            return
        event = next(self._events, None)
        if event is None:
            self._transport.write(b"0\r\n\r\n")
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        due += self._gap_s
        asyncio.get_running_loop().call_at(due, self._send, due)


def main() -> None:
    model, tokens, gap_ms = sys.argv[1:]
    engine = Engine(Path(model), int(tokens))
    uvloop.run(serve(partial(_Connection, engine, float(gap_ms) / 1000)))


if __name__ == "__main__":
    main()
