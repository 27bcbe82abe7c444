"""A bare ASGI pass-through: the floor with which the proxy's own cost is compared.

``python -m bridle.bench.passthrough --upstream URL --port N`` serves on uvicorn with the proxy's
settings and sends requests with aiohttp. It parses nothing, knows no session and keeps no record,
so its cost is that of these two libraries.
"""

from __future__ import annotations

from typing import Annotated, Any

import aiohttp
import typer
import uvicorn
from yarl import URL


class PassThrough:
    """An ASGI application that passes requests to the engine and replies back.

    It sends every request's body to the engine, and every reply's bytes back.
    """

    def __init__(self, upstream: str) -> None:
        self._url = URL(f"{upstream}/v1/chat/completions")
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=2**18,
            )
        body = await _body(receive)
        if not body:
            await _respond(send, 200, b"{}")
            return
        headers = {"content-type": "application/json"}
        async with self._http.post(self._url, data=body, headers=headers) as reply:
            kind = reply.headers["content-type"]
            if not kind.startswith("text/event-stream"):
                await _respond(send, reply.status, await reply.read())
                return
            start = {"type": "http.response.start", "status": reply.status}
            await send(start | {"headers": [(b"content-type", kind.encode())]})
            async for chunk in reply.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _body(receive: Any) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _respond(send: Any, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(upstream: Annotated[str, typer.Option()], port: Annotated[int, typer.Option()]) -> None:
    """Serve until the process is ended."""
    uvicorn.run(
        PassThrough(upstream),
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        log_level="warning",
        backlog=4096,
    )


if __name__ == "__main__":
    typer.run(main)
