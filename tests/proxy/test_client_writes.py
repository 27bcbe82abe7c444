"""Test that writes to a client arrive whole and in order, whatever server carries them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from bridle.proxy.http.client import Client
from bridle.proxy.http.protocol import StreamingProtocol
from bridle.proxy.settings import Limits
from bridle.proxy.wire.in_flight import Held, InFlight

Answer = Callable[[Client], Awaitable[None]]
SERVERS = pytest.mark.parametrize("http", [StreamingProtocol, "httptools", "h11"])


@contextmanager
def serving(answer: Answer, http: Any) -> Iterator[str]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(Client(scope, receive, send))

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=http,
        lifespan="off",
        log_level="critical",
        ws="none",
        access_log=False,
        server_header=False,
        date_header=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@SERVERS
def test_nothing_overtakes_what_was_handed_over_before(http: Any) -> None:
    async def answer(client: Client) -> None:
        client.start_stream("text/plain")
        for number in range(50):
            client.write(b"%d," % number)
            if number % 20 == 0:
                await asyncio.sleep(0)
        await client.finish(b"end")

    with serving(answer, http) as url, httpx.Client() as asking:
        expected = "".join(f"{number}," for number in range(50)) + "end"
        assert [asking.get(url).text for _ in range(3)] == [expected] * 3


@SERVERS
def test_a_chunk_leaves_while_the_application_waits_for_something_else(http: Any) -> None:
    told = threading.Event()

    async def answer(client: Client) -> None:
        client.start_stream("text/plain")
        client.write(b"first")
        await asyncio.to_thread(told.wait, 10)
        await client.finish(b"last")

    with serving(answer, http) as url, httpx.stream("GET", url) as reply:
        pieces = reply.iter_raw()
        assert next(pieces) == b"first"
        told.set()
        assert b"".join(pieces) == b"last"


@SERVERS
def test_a_client_that_has_gone_costs_nothing(http: Any) -> None:
    gone, over = threading.Event(), threading.Event()

    async def answer(client: Client) -> None:
        client.start_stream("text/plain")
        client.write(b"first")
        await asyncio.to_thread(gone.wait, 10)
        for _ in range(200):
            client.write(b"x" * 65536)
            await asyncio.sleep(0)
        await client.finish(b"last")
        over.set()

    with serving(answer, http) as url:
        with httpx.stream("GET", url) as reply:
            assert next(reply.iter_raw()) == b"first"
        gone.set()
        assert over.wait(10)


@SERVERS
def test_a_slow_client_is_told_to_be_waited_for_and_gets_all(http: Any) -> None:
    waited: list[int] = []

    async def answer(client: Client) -> None:
        client.start_stream("text/plain")
        for number in range(300):
            blocked = client.write(b"x" * 65536)
            if blocked is not None:
                waited.append(number)
                client.write(b"y")  # kept, in its order
                await blocked
        await client.finish(b"end")

    with serving(answer, http) as url, httpx.stream("GET", url) as reply:
        time.sleep(0.5)
        body = b"".join(reply.iter_raw())
    assert waited
    assert body.endswith(b"end")
    assert len(body) == 300 * 65536 + len(waited) + 3


@SERVERS
def test_a_whole_reply_is_http_whatever_was_asked(http: Any) -> None:
    """Several requests are in one write, and the last of them ends the connection.

    A request that only asks for the head gets none of the body.
    """

    async def answer(client: Client) -> None:
        body = await client.body(Limits(), Held(InFlight(1 << 30)))
        await client.respond(201, b"<%b>" % body, b"text/plain", ((b"x-told", b"yes"),))

    def asked(method: str, body: str, *lines: str) -> str:
        head = [f"{method} / HTTP/1.1", "host: here", f"content-length: {len(body)}", *lines]
        return "\r\n".join([*head, "", body])

    with serving(answer, http) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            last = asked("POST", "last", "connection: close")
            connection.sendall((asked("POST", "one") + asked("HEAD", "") + last).encode())
            reply = b"".join(iter(lambda: connection.recv(65536), b""))
    first, head, end = reply.split(b"HTTP/1.1 201 Created\r\n")[1:]
    assert first.endswith(b"\r\n\r\n<one>")
    assert head.endswith(b"\r\n\r\n")
    assert end.endswith(b"\r\n\r\n<last>")
    assert all(b"x-told: yes\r\n" in one for one in (first, head, end))
    assert b"connection: close\r\n" in end.lower()


@SERVERS
def test_no_header_can_smuggle_another_one(http: Any) -> None:
    async def answer(client: Client) -> None:
        await client.respond(200, b"ok", headers=((b"x-told", b"yes\r\nset-cookie: a=b"),))

    with serving(answer, http) as url:
        try:
            reply = httpx.get(url, trust_env=False)
        except httpx.RemoteProtocolError:
            return  # h11 hangs up
    assert reply.status_code == 500
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize(
    ("name", "protocol"), [("Upgrade", "h2c"), ("upgrade", "h2c"), ("UPGRADE", "tea")]
)
def test_a_client_that_offers_another_protocol_is_served_in_http_1(
    name: str, protocol: str
) -> None:
    """The client asks like Java's own: headers and body in two writes."""

    async def answer(client: Client) -> None:
        await client.respond(200, await client.body(Limits(), Held(InFlight(1 << 30))))

    headers = {
        "Connection": f"{name}, HTTP2-Settings",
        "HTTP2-Settings": "AAEAAEAA",
        name: protocol,
    }
    with serving(answer, StreamingProtocol) as url, httpx.Client() as asking:
        for body in (b"\r\nupgrade: h2c\r\n said", b"h2c again"):
            reply = asking.post(url, headers=headers, content=body)
            assert (reply.status_code, reply.content) == (200, body)
