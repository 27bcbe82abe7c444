"""An engine that misbehaves as the prompt names it, and serves slow steady streams to all others.

Run as a program: it prints its port. It is a process of its own, so that what it costs is not the
proxy's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\n"
STREAM, JSON = HEAD % b"text/event-stream", HEAD % b"application/json"
PIECE = b"x" * (64 << 10)


def chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


async def steady(send: Callable[[bytes], Any]) -> None:
    """A tick every 10 ms for as long as the client listens."""
    await send(STREAM)
    while True:
        await send(chunk("tick"))
        await asyncio.sleep(0.01)


async def endless_stream(send: Callable[[bytes], Any]) -> None:
    await send(STREAM)
    many = chunk("a") * 400
    while True:
        await send(many)


async def endless_line(send: Callable[[bytes], Any]) -> None:
    await send(STREAM + b'data: {"choices": [{"delta": {"content": "')
    while True:
        await send(PIECE)


async def endless_comments(send: Callable[[bytes], Any]) -> None:
    await send(STREAM)
    while True:
        await send(b": still here\n\n" * 4000)


async def endless_whole(send: Callable[[bytes], Any]) -> None:
    await send(JSON + b'{"choices": [{"message": {"content": "')
    while True:
        await send(PIECE)


async def held_whole(send: Callable[[bytes], Any]) -> None:
    """7.5 MiB of a whole reply, which never ends."""
    await send(JSON + b'{"choices": [{"message": {"content": "')
    for _ in range(120):
        await send(PIECE)
    await asyncio.sleep(600)


LARGEST = 7 << 20


def largest(message: str) -> bytes:
    """A choice of as many tokens as an event can hold."""
    count = LARGEST // 48
    choice = {
        "index": 0,
        message: {"content": "word " * count},
        "token_ids": [1000] * count,
        "logprobs": {"content": [{"logprob": -0.5, "token": "w"}] * count},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 1, "completion_tokens": count}
    return json.dumps(
        {"prompt_token_ids": [1], "choices": [choice], "usage": usage}, separators=(",", ":")
    ).encode()


EVENT, WHOLE = largest("delta"), largest("message")


async def largest_event(send: Callable[[bytes], Any]) -> None:
    await send(STREAM + b"data: " + EVENT + b"\n\ndata: [DONE]\n\n")


async def largest_whole(send: Callable[[bytes], Any]) -> None:
    await send(JSON + WHOLE)


def call(arguments: str, **more: Any) -> bytes:
    piece = {"index": 0, "function": {"arguments": arguments}, **more}
    return (
        b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": [piece]}}]}).encode() + b"\n\n"
    )


async def endless_arguments(send: Callable[[bytes], Any]) -> None:
    """50 MB of one call's arguments."""
    head = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a": "'}}
    first = {"choices": [{"delta": {"tool_calls": [head]}}]}
    await send(STREAM + b"data: " + json.dumps(first).encode() + b"\n\n")
    many = call("word " * 200) * 50
    for _ in range(1000):
        await send(many)
    await send(call('"}') + END)


async def largest_arguments(send: Callable[[bytes], Any]) -> None:
    """The arguments of a call of many keys, as long as a reply may be."""
    pieces = [json.dumps({f"k{i}": [i, {"a": "b"}] for i in range(j, j + 40)})[1:-1] + ", "
              for j in range(0, 40 * 1200, 40)]  # fmt: skip
    head = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}
    first = {"choices": [{"delta": {"tool_calls": [head]}}]}
    await send(STREAM + b"data: " + json.dumps(first).encode() + b"\n\n")
    for piece in pieces:
        await send(call(piece))
    await send(call('"z": 1}') + END)


def logprobs_event(count: int) -> bytes:
    top = [{"token": f"t{n}", "logprob": -n - 0.5, "bytes": [1, 2]} for n in range(4)]
    entry = {"token": "w", "logprob": -0.5, "bytes": [119], "top_logprobs": top}
    delta = {"content": "word " * count}
    choice = {"index": 0, "delta": delta, "token_ids": [7] * count}
    choice["logprobs"] = {"content": [entry] * count}
    body = json.dumps({"choices": [choice], "prompt_token_ids": [1]}, separators=(",", ":"))
    return b"data: " + body.encode() + b"\n\n"


MANY_LOGPROBS = logprobs_event(32_000)
"""Made before anybody waits: the steady streams come from this process, too."""


async def many_logprobs(send: Callable[[bytes], Any]) -> None:
    """32,000 tokens in one event, each with some alternatives."""
    await send(STREAM + MANY_LOGPROBS + END.replace(b'n_tokens": 1', b'n_tokens": 32000'))


async def many_comments(send: Callable[[bytes], Any]) -> None:
    await send(STREAM)
    for _ in range(100):
        await send(b":\n\n" * 40_000)
    await send(END)


CHUNKED = STREAM.replace(b"connection: close", b"transfer-encoding: chunked")


async def endless_chunk(send: Callable[[bytes], Any]) -> None:
    """A chunk of 2^64 bytes and more."""
    await send(CHUNKED + b"10000000000000000\r\n" + chunk("a"))
    await asyncio.sleep(600)


async def huge_chunk(send: Callable[[bytes], Any]) -> None:
    """A chunk of nearly 2^64 bytes, of which none follows."""
    await send(CHUNKED + b"fffffffffffffff0\r\n" + chunk("a"))
    await asyncio.sleep(600)


async def chunk_extension(send: Callable[[bytes], Any]) -> None:
    """An extension of 10 MB behind a chunk's size."""
    await send(CHUNKED + b"5;a=")
    for _ in range(160):
        await send(PIECE)
    await asyncio.sleep(600)


END = chunk("", "stop", usage={"prompt_tokens": 1, "completion_tokens": 1}) + b"data: [DONE]\n\n"

BEHAVIOURS = {
    each.__name__: each
    for each in (
        endless_stream,
        endless_line,
        endless_comments,
        endless_whole,
        held_whole,
        largest_event,
        largest_whole,
        endless_arguments,
        largest_arguments,
        many_logprobs,
        many_comments,
        endless_chunk,
        huge_chunk,
        chunk_extension,
    )
}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0)  # so that the steady streams have their turn

    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        body = await reader.readexactly(length)
        if not body:
            answer = b'{"data": [{"id": "m"}]}'
            await send(JSON + answer)
            return
        prompt = json.loads(body)["messages"][-1]["content"]
        await BEHAVIOURS.get(prompt, steady)(send)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
