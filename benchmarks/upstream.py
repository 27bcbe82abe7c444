"""A fast engine to measure proxies against: replies in vLLM's form, prepared in advance.

``python -m bridle.bench.upstream`` prints its port and serves until it is ended. The requested
model's name chooses the reply: ``bench-small`` (about 8 KB with ids and logprobs), ``bench-large``
(50,000 prompt ids) or ``bench-stream`` (100 chunks, 10 ms apart). The server is an
:class:`asyncio.Protocol` on httptools, so that the engine adds little to the measured time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httptools
import orjson
import uvloop

SMALL: Final = "bench-small"
LARGE: Final = "bench-large"
STREAM: Final = "bench-stream"

SMALL_SAMPLED: Final = 72
LARGE_PROMPT: Final = 50_000
CHUNKS: Final = 100
CHUNK_INTERVAL_S: Final = 0.01
_HEAD: Final = "chatcmpl-bench"


def _logprobs(count: int) -> dict[str, Any]:
    entry = {"token": " four", "logprob": -0.4375, "bytes": None, "top_logprobs": []}
    return {"content": [entry | {"logprob": -0.4375 - 0.001 * n} for n in range(count)]}


def whole(model: str, prompt: int, sampled: int) -> bytes:
    """Return the body of a complete chat reply."""
    return orjson.dumps(
        {
            "id": _HEAD,
            "object": "chat.completion",
            "created": 1_760_000_000,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": " four" * sampled},
                    "logprobs": _logprobs(sampled),
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": [(n * 7919) % 151_936 for n in range(sampled)],
                }
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": sampled,
                "total_tokens": prompt + sampled,
            },
            "prompt_token_ids": [(n * 104_729) % 151_936 for n in range(prompt)],
        }
    )


def stream_events() -> list[bytes]:
    """Return the events of a streamed reply.

    They are the role, ``CHUNKS`` tokens, then the end with its usage.
    """

    def event(choice: dict[str, Any] | None, **fields: Any) -> bytes:
        body = {
            "id": _HEAD,
            "object": "chat.completion.chunk",
            "created": 1_760_000_000,
            "model": STREAM,
            "choices": [] if choice is None else [{"index": 0, **choice}],
        }
        return b"data: " + orjson.dumps(body | fields) + b"\n\n"

    role = event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[*range(256)])
    tokens = [
        event(
            {
                "delta": {"content": " four"},
                "logprobs": _logprobs(1),
                "finish_reason": "stop" if number == CHUNKS - 1 else None,
                "token_ids": [number + 11],
            }
        )
        for number in range(CHUNKS)
    ]
    usage = event(None, usage={"prompt_tokens": 256, "completion_tokens": CHUNKS})
    return [role + tokens[0], *tokens[1:-1], tokens[-1] + usage + b"data: [DONE]\n\n"]


def _response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_MODELS: Final = _response(
    orjson.dumps({"object": "list", "data": [{"id": name} for name in (SMALL, LARGE, STREAM)]})
)
_WHOLE: Final = {
    SMALL.encode(): _response(whole(SMALL, 256, SMALL_SAMPLED)),
    LARGE.encode(): _response(whole(LARGE, LARGE_PROMPT, 64)),
}
_EVENTS: Final = stream_events()
_STREAM: Final = [
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + _chunk(_EVENTS[0]),
    *(_chunk(event) for event in _EVENTS[1:-1]),
    _chunk(_EVENTS[-1]) + b"0\r\n\r\n",
]


class Upstream(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        if not body:
            self._transport.write(_MODELS)
            return
        # The name is short and stands near one of the ends, whoever wrote the request.
        ends = body[:256] + body[-512:]
        if STREAM.encode() in ends:
            self._next(0)
        else:
            self._transport.write(_WHOLE[(LARGE if LARGE.encode() in ends else SMALL).encode()])

    def _next(self, number: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_STREAM[number])
        if number + 1 < len(_STREAM):
            loop = asyncio.get_running_loop()
            loop.call_later(CHUNK_INTERVAL_S, self._next, number + 1)


async def serve(connection: Callable[[], asyncio.Protocol]) -> None:
    """Print a free port and serve on it until the process is ended."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(Upstream))
