"""The process beside a proxy that makes its pages, and the requests that are passed on to it.

It is started at the first page. If it has ended, the request that notices it gets an error, and the
next one starts it anew. Calls never wait for it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import httpx
import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bridle.store.errors import StoreUnavailable
from bridle.viewer.process import FORM, NEAR, TOKEN, PagesSettings
from bridle.viewer.scoring import ScoreForm

_PASSED: Final = ("accept", "hx-request")
"""Headers of a request that the pages need."""
_LEFT_OUT: Final = frozenset({"connection", "date", "server", "transfer-encoding"})
"""Headers of a response that are the connection's own."""
_KEPT: Final = frozenset({"HOME", "LANG", "LC_ALL", "PATH", "PYTHONPATH", "TMPDIR", "TZ"})
"""The variables of the process's environment."""
_TIMEOUT_S: Final = 600.0


class PagesProcess:
    """The process of one proxy, and a client of it."""

    def __init__(self, store: str, root: str) -> None:
        self._store = store
        self._root = root
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._client: httpx.AsyncClient | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, or ``None`` if it was not started."""
        return None if self._process is None else self._process.pid

    async def answer(self, request: Request, form: ScoreForm) -> Response:
        """Return the response of the process to a request. ``form`` is that of its page.

        Raise :class:`bridle.store.errors.StoreUnavailable` if it has ended.
        """
        client = await self._running()
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        headers |= {FORM: form.token, NEAR: str(int(form.near))}
        address = httpx.URL(path=request.url.path, query=request.url.query.encode())
        try:
            reply = await client.send(
                client.build_request("GET", address, headers=headers), stream=True
            )
        except httpx.TransportError as error:
            await self._end()
            cause = "the process that makes the pages has ended: open the page again"
            raise StoreUnavailable(cause) from error
        return StreamingResponse(
            reply.aiter_raw(),
            reply.status_code,
            {name: value for name, value in reply.headers.items() if name not in _LEFT_OUT},
            background=BackgroundTask(reply.aclose),
        )

    async def close(self) -> None:
        async with self._lock:
            await self._end()

    async def _running(self) -> httpx.AsyncClient:
        async with self._lock:
            if self._client is not None and self._process is not None:
                if self._process.poll() is None:
                    return self._client
                await self._end()
            token = secrets.token_urlsafe(32)
            self._process, port = await asyncio.to_thread(self._start, token)
            self._client = httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={TOKEN: token},
                timeout=_TIMEOUT_S,
                trust_env=False,
            )
            return self._client

    def _start(self, token: str) -> tuple[subprocess.Popen[bytes], int]:
        settings = PagesSettings(
            store=self._store,
            root=self._root,
            token=token,
            environment={name: value for name, value in os.environ.items() if name[:2] == "PG"},
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            number = listener.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", "bridle.viewer.process", str(number)],
                stdin=subprocess.PIPE,
                pass_fds=[number],
                env=_environment(os.environ),
                start_new_session=True,
            )
            if process.stdin is not None:
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
                process.stdin.flush()
            return process, int(listener.getsockname()[1])

    async def _end(self) -> None:
        process, self._process = self._process, None
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
        if process is not None:
            await asyncio.to_thread(_stop, process)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name in _KEPT}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process, which ends when its standard input is closed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
