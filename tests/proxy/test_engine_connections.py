"""The transports to an engine: bytes passed on as they arrive, faults distinguished.

What the interface promises is tested with both implementations.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bridle.proxy.engines.transport import (
    ConnectionBroke,
    ConnectionEpochOver,
    ConnectionFailed,
    EngineConnections,
)
from support.plain_transport import PlainTransport

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class Served:
    """A server whose every request is answered by ``answer``."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def serving(answer: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[Served]:
    served = Served()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                served.heads.append(head)
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                served.bodies.append(await reader.readexactly(length))
                await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            served.closed.set()
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()


def says(*writes: bytes, close: bool = False, apart_s: float = 0.02) -> Handler:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for data in writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(apart_s)
        if close:
            writer.close()

    return answer


TRANSPORTS: Any = pytest.mark.parametrize("make", [EngineConnections, PlainTransport])


@asynccontextmanager
async def connected(
    url: str, make: Callable[..., Any] = EngineConnections, **options: Any
) -> AsyncIterator[Any]:
    given = {"api_key": None, "limit": 8, "connect_timeout_s": 5.0, "stall_timeout_s": 5.0}
    connections = make(url, **(given | options))
    try:
        yield connections
    finally:
        await connections.close()


async def asked(connections: Any, body: bytes = b"{}") -> bytes:
    reply = await connections.request("POST", "/v1/x", body)
    body: bytes = await reply.read()
    return body


async def test_a_connection_serves_the_next_request_too() -> None:
    async with serving(says(OK)) as served, connected(served.url) as connections:
        assert [await asked(connections) for _ in range(3)] == [b"ok"] * 3
        assert served.connections == 1


@TRANSPORTS
async def test_a_reply_that_ends_with_its_connection_is_whole(make: Any) -> None:
    old = b"HTTP/1.0 200 OK\r\n\r\n"
    async with serving(says(old, b"all of ", b"it", close=True)) as served:
        async with connected(served.url, make) as connections:
            assert await asked(connections) == b"all of it"
            assert await asked(connections) == b"all of it"
        assert served.connections == 2


@TRANSPORTS
async def test_a_reply_shorter_than_announced_is_broken(make: Any) -> None:
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
    async with serving(says(cut, close=True)) as served, connected(served.url, make) as connections:
        with pytest.raises(ConnectionBroke):
            await asked(connections)


@TRANSPORTS
@pytest.mark.parametrize(
    "nonsense",
    [
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        OK + OK,
        STREAM + b"0\r\n" + b"".join(b"a%d: %b\r\n" % (n, b"b" * 1000) for n in range(100)),
    ],
    ids=[
        "no_http",
        "bad_length",
        "endless_headers",
        "upgrade",
        "answered_twice",
        "endless_trailer",
    ],
)
async def test_what_makes_no_sense_ends_the_connection(make: Any, nonsense: bytes) -> None:
    async with serving(says(nonsense)) as served, connected(served.url, make) as connections:
        with pytest.raises(ConnectionBroke):
            await asked(connections)


@TRANSPORTS
async def test_nothing_listens_there(make: Any) -> None:
    async with serving(says(OK)) as served:
        url = served.url
    async with connected(url, make) as connections:
        with pytest.raises(ConnectionFailed):
            await asked(connections)


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's certificate, which clients trust."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate)]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    subprocess.run(["openssl", "req", "-x509", *made, *names], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@TRANSPORTS
async def test_an_engine_behind_tls(make: Any, tls: ssl.SSLContext) -> None:
    body = b"x" * 100_000
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving(says(head + body), tls) as served:
        async with connected(f"https://127.0.0.1:{served.port}", make) as connections:
            assert [await asked(connections) for _ in range(3)] == [body] * 3
        assert served.connections == (1 if make is EngineConnections else 3)


async def test_connections_that_are_closed_send_nothing_more() -> None:
    async with serving(says(OK)) as served, connected(served.url) as connections:
        assert await asked(connections) == b"ok"
        await connections.close()
        with pytest.raises(ConnectionFailed, match="closed"):
            await asked(connections)
        assert len(served.heads) == 1


@TRANSPORTS
async def test_who_does_not_answer_the_connection_cannot_be_reached(make: Any) -> None:
    """The listener acts like a machine that is gone.

    Nothing was sent, so that another engine may be asked.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with ExitStack() as queued:
            for _ in range(4):  # more than it lets wait: the kernel drops the next one
                waiting = queued.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
            await asyncio.sleep(0.1)
            url = f"http://127.0.0.1:{address[1]}"
            async with connected(url, make, connect_timeout_s=0.2) as connections:
                with pytest.raises(ConnectionFailed):
                    await asked(connections)


@TRANSPORTS
async def test_interim_replies_are_passed_over(make: Any) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with serving(says(interim, OK)) as served, connected(served.url, make) as connections:
        reply = await connections.request("POST", "/v1/x", b"{}")
        assert (reply.status, "link" in reply.headers) == (200, False)
        assert await reply.read() == b"ok"


@TRANSPORTS
async def test_each_read_reaches_its_follower_at_once_and_whole(make: Any) -> None:
    wanted = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(b"one") + chunk(b"two"))
        await wanted.wait()
        writer.write(chunk(b"three") + b"0\r\n\r\n")

    seen: list[bytes] = []

    def follow(body: bytes) -> None:
        seen.append(body)
        wanted.set()

    async with serving(answer) as served, connected(served.url, make) as connections:
        reply = await connections.request("POST", "/v1/x", b"{}")
        await reply.follow(follow)
        assert b"".join(seen) == b"onetwothree"
        if make is EngineConnections:
            assert seen == [b"onetwo", b"three"], "a read goes on in one piece"


@TRANSPORTS
async def test_a_follower_that_is_slow_holds_the_engine_back(make: Any) -> None:
    piece, sent = b"x" * 65536, 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM)
        for _number in range(400):
            writer.write(chunk(piece))
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    async with serving(answer) as served, connected(served.url, make) as connections:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        taken = 0

        def follow(body: bytes) -> asyncio.Future[None] | None:
            nonlocal taken
            taken += len(body)
            return None if ready.done() else ready

        reply = await connections.request("POST", "/v1/x", b"{}")
        following = asyncio.ensure_future(reply.follow(follow))
        await asyncio.sleep(0.3)
        assert sent < 400
        assert taken <= 1 << 20
        ready.set_result(None)
        await following
        assert taken == 400 * len(piece)


async def test_a_large_reply_leaves_every_turn_to_others_too() -> None:
    """Also when its follower wants to wait in the midst of what was read."""
    body = bytes(range(256)) * 8192
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    pieces: list[bytes] = []
    turns: list[int] = []
    turn = 0

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def follower(piece: bytes) -> asyncio.Future[Any] | None:
        pieces.append(piece)
        turns.append(turn)
        return asyncio.ensure_future(asyncio.sleep(0.001)) if len(pieces) % 8 == 0 else None

    async with serving(says(head + body)) as served, connected(served.url) as connections:
        counting = asyncio.create_task(count())
        response = await connections.request("POST", "/v1/x", b"{}")
        await response.follow(follower)
        assert b"".join(pieces) == body
        assert len(turns) <= len(set(turns)) + 1, "what came before it was followed"
        assert max(len(piece) for piece in pieces) <= (16 << 10) + 256, "up to the end of a line"
        response = await connections.request("POST", "/v1/x", b"{}")
        assert await response.read() == body
        counting.cancel()
        assert served.connections == 1


async def test_a_second_reply_behind_a_large_one_is_nobodys() -> None:
    body = b"x" * (64 << 10)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer = says(head + body + OK * 4000)
    async with serving(answer) as served, connected(served.url) as connections:
        for _ in range(2):
            with suppress(ConnectionBroke):
                assert await asked(connections) == body
        assert served.connections == 2


@TRANSPORTS
async def test_what_a_follower_raises_reaches_who_waits_and_ends_the_connection(make: Any) -> None:
    def follow(_: bytes) -> None:
        raise ZeroDivisionError

    answer = says(STREAM, chunk(b"one"), chunk(b"two"))
    async with serving(answer) as served, connected(served.url, make) as connections:
        reply = await connections.request("POST", "/v1/x", b"{}")
        with pytest.raises(ZeroDivisionError):
            await reply.follow(follow)
        await gone(served)


async def test_who_needs_no_more_goes_on_and_the_connection_stays() -> None:
    tail = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(b"enough"))
        await tail.wait()
        writer.write(b"0\r\n\r\n")

    async with serving(answer) as served, connected(served.url) as connections:
        reply = await connections.request("POST", "/v1/x", b"{}")
        await reply.follow(lambda _: reply.leave())
        tail.set()
        await asyncio.sleep(0.05)
        second = await connections.request("POST", "/v1/x", b"{}")
        await second.follow(lambda _: second.leave())
        assert served.connections == 1


@TRANSPORTS
async def test_closing_a_reply_that_is_not_whole_ends_its_connection(make: Any) -> None:
    answer = says(STREAM, chunk(b"one"))
    async with serving(answer) as served, connected(served.url, make) as connections:
        reply = await connections.request("POST", "/v1/x", b"{}")
        reply.close()
        await gone(served)


@TRANSPORTS
async def test_silence_is_given_up_and_time_with_bytes_is_not_silence(make: Any) -> None:
    slow = says(STREAM, *[chunk(b".")] * 15, b"0\r\n\r\n", apart_s=0.1)
    async with (
        serving(slow) as served,
        connected(served.url, make, stall_timeout_s=1.0) as connections,
    ):
        assert await asked(connections) == b"." * 15
    mute = says(STREAM)
    async with (
        serving(mute) as served,
        connected(served.url, make, stall_timeout_s=0.2) as connections,
    ):
        with pytest.raises(TimeoutError):
            await asked(connections)
        await gone(served)


async def test_each_request_on_a_connection_has_its_own_patience() -> None:
    async def late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(OK)

    async with serving(late) as served, connected(served.url, stall_timeout_s=0.2) as engine:
        for timeout_s in (0.5, 2.0):
            assert await (await engine.request("POST", "/x", timeout_s=timeout_s)).read() == b"ok"
            await asyncio.sleep(0.4)  # past the end of the first one's patience
        started = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await engine.request("POST", "/x", timeout_s=0.1)
        assert asyncio.get_running_loop().time() - started < 0.25
        assert served.connections == 1


async def test_requests_beyond_the_limit_wait_for_a_connection() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(OK)

    async with serving(answer) as served, connected(served.url, limit=2) as connections:
        asking = [asyncio.ensure_future(asked(connections)) for _ in range(8)]
        await asyncio.sleep(0)
        asking[2].cancel()  # its turn goes to another
        replies = await asyncio.gather(*asking, return_exceptions=True)
        assert replies.count(b"ok") == 7
        assert served.connections == 2


@TRANSPORTS
async def test_an_engine_behind_a_path_and_a_password(make: Any) -> None:
    async with serving(says(OK)) as served:
        url = f"http://me:s%40fe@127.0.0.1:{served.port}/far/away"
        async with connected(url, make) as connections:
            await asked(connections, b'{"a":1}')
        (head,) = served.heads
        assert head.startswith(b"POST /far/away/v1/x HTTP/1.1\r\n")
        assert b"authorization: Basic " + base64.b64encode(b"me:s@fe") in head
        assert served.bodies == [b'{"a":1}']


@TRANSPORTS
@pytest.mark.parametrize(
    ("url", "api_key"), [("ftp://engine", None), ("engine", None), ("http://engine", "a\r\nb: c")]
)
async def test_an_address_or_key_that_cannot_be_sent_is_refused(
    make: Any, url: str, api_key: str | None
) -> None:
    with pytest.raises(ValueError, match="engine"):
        async with connected(url, make, api_key=api_key):
            pass


async def gone(served: Served) -> None:
    """Returns when the server has seen its connection end."""
    await asyncio.wait_for(served.closed.wait(), 5)


async def test_an_epoch_lasts_while_any_connection_is_open() -> None:
    """Only when all were lost may another process be answering."""
    arrived, go_on = asyncio.Event(), asyncio.Event()
    last = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = served.bodies[-1]
        if body == b"wait":
            arrived.set()
            await go_on.wait()
        writer.write(OK if body != b"leave" else last)

    async def within(connection_epoch: int, body: bytes) -> bytes:
        reply = await connections.request("POST", "/v1/x", body, connection_epoch=connection_epoch)
        return await reply.read()

    async with serving(answer) as served, connected(served.url) as connections:
        assert connections.connection_epoch == 0
        with pytest.raises(ConnectionEpochOver):
            await within(0, b"first")
        assert served.bodies == [], "nothing was sent"
        assert await within(1, b"first") == b"ok"
        assert served.connections == 1, "the connection was kept"
        waiting = asyncio.create_task(within(1, b"wait"))
        await arrived.wait()
        for _ in range(2):
            assert await within(1, b"leave") == b"ok"
        go_on.set()
        assert await waiting == b"ok"
        assert await within(1, b"leave") == b"ok"
        with pytest.raises(ConnectionEpochOver):
            await within(1, b"late")
        assert await within(2, b"again") == b"ok"
        assert b"late" not in served.bodies
