"""Test that many clients cost a proxy no more than each of them alone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bridle.proxy.http.protocol import StreamingProtocol
from bridle.proxy.server import ProxyServer
from bridle.proxy.session.memory import SessionMemory
from bridle.proxy.session.trails import WORTH_KEEPING, Trails
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.canonical import Message, Request
from bridle.store.records import CallStatus, SessionRecord

CLIENTS = 48


def test_connections_that_come_at_once_are_accepted_in_one_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, accepted = [0], []
    made = StreamingProtocol.connection_made

    def count(loop: asyncio.AbstractEventLoop) -> None:
        turns[0] += 1
        if len(accepted) <= CLIENTS:
            loop.call_soon(count, loop)

    def noted(protocol: StreamingProtocol, transport: Any) -> None:
        if not accepted:  # The first connection holds the loop up while the others come.
            count(protocol.loop)
            time.sleep(0.5)
        accepted.append(turns[0])
        made(protocol, transport)

    monkeypatch.setattr(StreamingProtocol, "connection_made", noted)
    settings = ProxySettings("http://127.0.0.1:9", str(tmp_path / "bridle.db"))
    with ProxyServer(settings) as server:
        address = ("127.0.0.1", server.port)
        clients = [socket.create_connection(address) for _ in range(CLIENTS + 1)]
        deadline = time.monotonic() + 10
        while len(accepted) <= CLIENTS and time.monotonic() < deadline:
            time.sleep(0.01)
        for client in clients:
            client.close()
    assert len(accepted) == CLIENTS + 1
    assert accepted[-1] - accepted[0] <= 2


def test_a_connection_accepted_before_a_stop_does_not_delay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, made = StreamingProtocol._connect, StreamingProtocol.connection_made
    waiting = threading.Event()

    def held_up(protocol: StreamingProtocol, transport: Any) -> None:
        time.sleep(0.3)  # The second connection comes meanwhile.
        made(protocol, transport)

    async def late(protocol: StreamingProtocol, accepted: Any, listener: socket.socket) -> None:
        waiting.set()
        while listener.fileno() >= 0:  # noqa: ASYNC110 - the server sets no event
            await asyncio.sleep(0)
        await connect(protocol, accepted, listener)

    monkeypatch.setattr(StreamingProtocol, "connection_made", held_up)
    monkeypatch.setattr(StreamingProtocol, "_connect", late)
    settings = ProxySettings("http://127.0.0.1:9", str(tmp_path / "bridle.db"))
    with ProxyServer(settings, grace_s=20) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        assert waiting.wait(10)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert [client.recv(1) for client in clients] == [b"", b""]


def test_a_full_memory_looks_at_no_session_but_those_it_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = [0]
    size = Trails.size.fget  # type: ignore[attr-defined]

    def counted(trails: Trails) -> int:
        looked[0] += 1
        return int(size(trails))

    monkeypatch.setattr(Trails, "size", property(counted))
    memory = SessionMemory(None, 1 << 20)  # type: ignore[arg-type]
    for number in range(2000):
        memory.add(SessionRecord(f"session_{number}", 0.0, name=f"{number}"), new=True)
    assert memory.get("session_0") is None
    assert memory.get("session_1999") is not None
    assert looked[0] <= 5 * 2000


async def test_a_full_memory_gives_up_the_requests_longest_unused_before_any_session() -> None:
    memory = SessionMemory(None, 125_000)  # type: ignore[arg-type]
    sessions = [
        memory.add(SessionRecord(f"ses_{number}", 0.0, name=f"{number}"), new=True)
        for number in range(3)
    ]
    said = [Message("user", "x" * 1000)] * WORTH_KEEPING
    request = Request(dialect="chat", model="m", messages=tuple(said))
    for number in (0, 1, 0, 2):
        session, call_id = sessions[number], f"call_{number}"
        link = await memory.find(session, request)
        memory.begin(session, call_id)
        memory.end(session, call_id, session.turn(call_id, link, CallStatus.FAILED))
    assert [session.trails.size > 0 for session in sessions] == [True, False, True]
    assert [memory.get(session.id) for session in sessions] == sessions
