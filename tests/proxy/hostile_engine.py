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
