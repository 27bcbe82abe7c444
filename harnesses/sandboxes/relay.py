"""The one way out of a session's container: its session's URLs, by a mounted Unix socket.

A connection begins with a line that names its purpose: ``control`` (the container's first process,
once), ``session`` (HTTP to the proxy, below the session's own paths only), ``egress`` (an HTTP
proxy to the hosts that the task allows), ``zygote`` (the container's warm process, once) or
``report TOKEN JSON`` (the result of a launched process).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

_CHUNK: Final = 1 << 16
_HEAD_BYTES: Final = 1 << 18
_HOST: Final = re.compile(rb"(?im)^host:[^\r\n]*")
_REFUSED: Final = (
    b"HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"this container reaches its own session and nothing else\n"
)
_UNREACHABLE: Final = (
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"the proxy of this session does not answer\n"
)


class Relay:
    """Serves one container; :attr:`lost` is set when its first process is gone."""

    def __init__(self, urls: Iterable[str], allowed_hosts: Iterable[str]) -> None:
        found = [urlsplit(url) for url in urls if url]
        self._upstream = found[0] if found else None
        self._paths = {_session_root(url.path) for url in found}
        self._allowed = frozenset(allowed_hosts)
        self._control: asyncio.StreamWriter | None = None
        self._answers: asyncio.StreamReader | None = None
        self._reports: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self.ready: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        """The numbers of the agent's user and group, once the container has started."""
        self.zygote: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )
        """The connection to the container's warm process, if one is started."""
        self.lost = asyncio.Event()

    async def start(self, path: Path) -> None:
        server = await asyncio.start_unix_server(self._serve, path, limit=_HEAD_BYTES)
        self._servers.append(server)
        await asyncio.to_thread(path.chmod, 0o666)

    async def listen(self, listener: socket.socket) -> None:
        """Serve the session's URLs at a socket that listens in the session's own network."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(reader, writer, "session")

        self._servers.append(await asyncio.start_server(serve, sock=listener, limit=_HEAD_BYTES))

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self.ready.cancel()
        self.zygote.cancel()

    def expect(self, token: str) -> asyncio.Future[dict[str, Any]]:
        """Return a future for the result of the process with ``token``."""
        self._reports[token] = asyncio.get_running_loop().create_future()
        return self._reports[token]

    def forget(self, token: str) -> None:
        self._reports.pop(token, None)

    def allow(self, urls: Iterable[str]) -> None:
        """Let a further session's URLs through."""
        self._paths |= {_session_root(urlsplit(url).path) for url in urls}

    def disallow(self, urls: Iterable[str]) -> None:
        self._paths -= {_session_root(urlsplit(url).path) for url in urls}

    async def signal_all(self, number: int) -> None:
        """Signal every process of the container but its first, unless the container is gone."""
        await self.command({"do": "kill", "signal": number, "uid": None})

    async def command(self, asked: Mapping[str, Any]) -> None:
        """Send a command to the container's first process and wait for it.

        Do nothing if the container is gone.
        """
        async with self._turn:
            if self._control is None or self._answers is None or self.lost.is_set():
                return
            with contextlib.suppress(ConnectionError):
                self._control.write(msgspec.json.encode(asked) + b"\n")
                await self._answers.readline()

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        greeting: str | None = None,
    ) -> None:
        task: asyncio.Task[None] = asyncio.current_task()  # type: ignore[assignment]
        self._serving.add(task)
        try:
            if greeting is None:
                greeting = (await reader.readline()).decode("ascii", "replace").strip()
            if greeting == "control" and self._control is None:
                await self._keep(reader, writer)
            elif greeting == "session" and self._upstream is not None:
                await self._to_session(self._upstream, reader, writer)
            elif greeting == "egress":
                await self._to_allowed(reader, writer)
            elif greeting == "zygote" and not self.zygote.done():
                self.zygote.set_result((reader, writer))
                await self.lost.wait()
            elif greeting.startswith("report "):
                self._note(greeting)
        except (ConnectionError, ValueError, asyncio.IncompleteReadError):
            pass  # The other side is gone, or is no client of this.
        except asyncio.CancelledError:
            pass  # The relay is closed; nothing waits for this task.
        finally:
            self._serving.discard(task)
            writer.close()

    async def _keep(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._control = writer
        try:
            line = await reader.readline()
            if line and not self.ready.done():
                self.ready.set_result(msgspec.json.decode(line, type=dict[str, int]))
                self._answers = answers = asyncio.StreamReader()
                while data := await reader.read(_CHUNK):
                    answers.feed_data(data)
        finally:
            if self._answers is not None:
                self._answers.feed_eof()
            self.lost.set()

    def _note(self, greeting: str) -> None:
        _, token, text = greeting.split(" ", 2)
        expected = self._reports.pop(token, None)
        if expected is not None and not expected.done():
            expected.set_result(msgspec.json.decode(text.encode(), type=dict[str, Any]))

    async def _to_session(
        self, upstream: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        secure = ssl.create_default_context() if upstream.scheme == "https" else None
        port = upstream.port or (443 if secure else 80)
        try:
            up_reader, up_writer = await asyncio.open_connection(
                upstream.hostname, port, ssl=secure
            )
        except OSError:
            # Unread bytes would make the close a reset, which hides the answer.
            await reader.read(_CHUNK)
            writer.write(_UNREACHABLE)
            await writer.drain()
            return
        answering = asyncio.create_task(_pump(up_reader, writer))
        requests = _Requests(self._paths, upstream.netloc.encode())
        try:
            while data := await reader.read(_CHUNK):
                passed = requests.feed(data)
                if passed is None:
                    writer.write(_REFUSED)
                    await writer.drain()
                    return
                up_writer.write(passed)
                await up_writer.drain()
            with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
                up_writer.write_eof()
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            up_writer.close()

    async def _to_allowed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request to an HTTP proxy: ``CONNECT HOST:PORT``, or a plain ``http://`` URL."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b" ", 2)
        connecting = method == b"CONNECT"
        url = urlsplit(("//" if connecting else "") + target.decode("ascii"))
        if not _is_allowed(url.hostname or "", self._allowed):
            writer.write(_REFUSED)
            await writer.drain()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(
                url.hostname, url.port or (443 if connecting else 80)
            )
        except OSError:
            writer.write(_UNREACHABLE)
            await writer.drain()
            return
        if connecting:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            # One connection serves one host: what follows could be for another.
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            head = head.replace(target, path.encode(), 1)
            far_writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        back = asyncio.create_task(_pump(far_reader, writer))
        try:
            await _pump(reader, far_writer)
            await back
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            far_writer.close()


class _Requests:
    """A client's side of a connection to the proxy.

    It holds back heads until their path is known.
    """

    def __init__(self, paths: Collection[str], host: bytes) -> None:
        self._paths = paths
        self._host = b"Host: " + host
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._in_head = False
        self._refused = False
        self._upgrading = False
        self._held = b""

    def feed(self, data: bytes) -> bytes | None:
        """Return the bytes that may pass now, or ``None`` for a request that goes elsewhere."""
        if self._upgrading:
            return None
        self._held += data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The proxy refuses the upgrade; nothing may follow on this connection.
            self._upgrading = True
        except httptools.HttpParserError:
            return None
        if self._refused or (self._in_head and len(self._held) > _HEAD_BYTES):
            return None
        if self._in_head:
            return b""
        passed, self._held = self._held, b""
        return passed

    def on_message_begin(self) -> None:
        self._in_head, self._url = True, b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._refused |= not _is_below(self._url.decode("latin-1"), self._paths)
        head, end, body = self._held.partition(b"\r\n\r\n")
        self._held = _HOST.sub(self._host, head) + end + body


def _session_root(path: str) -> str:
    """Return ``/s/ID`` of ``/s/ID/v1``, below the path at which the proxy is mounted."""
    return path.rstrip("/").removesuffix("/v1")


def _is_below(target: str, roots: Collection[str]) -> bool:
    path = target.partition("?")[0]
    if ".." in path or "%2e" in path.lower() or "//" in path:
        return False
    return any(path == root or path.startswith(root + "/") for root in roots)


def _is_allowed(host: str, allowed: frozenset[str]) -> bool:
    """Return whether ``host`` is in the list, or below a ``*.domain`` of it."""
    above = host.split(".")
    return host in allowed or any(
        "*." + ".".join(above[number:]) in allowed for number in range(1, len(above))
    )


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
        writer.write_eof()
