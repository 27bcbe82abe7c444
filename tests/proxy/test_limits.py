"""Every limit, reached by a client or an engine that misbehaves.

The proxy stays small, and another client's stream goes on.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.proxy.settings import Limits
from bridle.proxy.wire.canonical import ApiError
from bridle.proxy.wire.in_flight import Held, InFlight
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus

PEAK_MIB = 400
STALL_S = 0.25
HELD_BYTES = 120 * (64 << 10)
"""The bytes of each reply that ``hostile_engine.held_whole`` does not end."""
CHAT = "/v1/chat/completions"
KEY = "an-admin-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
LIMITS = {"head_timeout_s": "2", "body_timeout_s": "2", "connections": "64"}


def ask(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], **more}


def post(proxy: Attacked, body: dict[str, Any], timeout: float = 120) -> httpx.Response:
    return httpx.post(proxy.url + CHAT, headers=HEADERS, json=body, timeout=timeout)


@dataclass
class Attacked:
    """A proxy in a process of its own, before an engine in another."""

    url: str
    pid: int
    store: Path
    gaps: list[float] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    @property
    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found
        return int(found[1]) / 1024

    def events(self) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics", headers=HEADERS).text
        return {
            name: float(value)
            for name, value in re.findall(r'bridle_events_total\{name="(\w+)"\} (\S+)', text)
        }

    def calls(self, prompt: str) -> list[CallRow]:
        """Finished calls with this prompt."""
        with Reader(f"sqlite:///{self.store}") as reader:
            rows = [row for session in reader.sessions() for row in reader.calls(session.id)]
        return [row for row in rows if row.ended_at and prompt in str(row.conversation)]

    @contextmanager
    def bystander(self) -> Iterator[None]:
        """Stream as another client.

        The longest wait between two reads, once it runs, must be short.
        """
        over = threading.Event()
        running = threading.Event()

        def listen() -> None:
            body = ask("steady", stream=True)
            url = self.url + CHAT
            with httpx.stream("POST", url, headers=HEADERS, json=body, timeout=20) as response:
                last = None
                for _ in response.iter_raw():
                    now = time.monotonic()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now
                    running.set()
                    if over.is_set():
                        return

        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(listen)
            assert running.wait(20)
            yield
            over.set()
            listening.result()


@contextmanager
def running(directory: Path, **limits: str) -> Iterator[Attacked]:
    """A proxy with these limits."""
    script = Path(__file__).with_name("hostile_engine.py")
    with ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "BRIDLE_ADMIN_KEY": KEY},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        engine = start(sys.executable, str(script))
        assert engine.stdout
        port = engine.stdout.readline().strip()
        store = directory / "store.db"
        options = [
            part for name, value in limits.items() for part in ("--set", f"limits.{name}={value}")
        ]
        command = [sys.executable, "-m", "bridle", "proxy", "--engine", f"http://127.0.0.1:{port}"]
        command += ["--store", f"sqlite:///{store}", "--port", "0", "--json", *options]
        proxy = start(*command)
        assert proxy.stdout
        url = json.loads(proxy.stdout.readline())["url"]
        yield Attacked(url, proxy.pid, store)


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    with running(tmp_path, **LIMITS) as proxy:
        with proxy.bystander():
            yield proxy
        print(f"peak {proxy.peak_mib:.0f} MiB, longest stall {max(proxy.gaps) * 1000:.0f} ms")
        assert proxy.peak_mib <= PEAK_MIB
        assert max(proxy.gaps) <= STALL_S


@pytest.mark.limits
@pytest.mark.parametrize(
    ("behaviour", "stream", "limit"),
    [
        ("endless_stream", True, "limit_reply_bytes"),
        ("endless_line", True, "limit_event_bytes"),
        ("endless_comments", True, "limit_reply_bytes"),
        ("endless_arguments", True, "limit_reply_characters"),
        ("endless_whole", False, "limit_event_bytes"),
    ],
)
def test_an_engines_reply_without_an_end_is_ended(
    attacked: Attacked, behaviour: str, stream: bool, limit: str
) -> None:
    response = httpx.post(
        attacked.url + CHAT, headers=HEADERS, json=ask(behaviour, stream=stream), timeout=120
    )
    assert limit.removeprefix("limit_") in response.text
    assert response.status_code == (200 if stream and response.text.startswith("data") else 502)
    assert attacked.events()[limit] == 1
    [call] = attacked.calls(behaviour)
    assert limit in [note.name for note in call.notes]


@pytest.mark.limits
@pytest.mark.parametrize(
    ("behaviour", "stream"), [("largest_event", True), ("largest_whole", False)]
)
def test_the_largest_reply_stalls_nobody(attacked: Attacked, behaviour: str, stream: bool) -> None:
    assert post(attacked, ask(behaviour, stream=stream)).status_code == 200
    [call] = attacked.calls(behaviour)
    assert call.status is CallStatus.COMPLETE
    assert call.sampled_tokens > 100_000


@pytest.mark.limits
@pytest.mark.parametrize("behaviour", ["largest_arguments", "many_comments"])
def test_the_largest_stream_stalls_nobody(attacked: Attacked, behaviour: str) -> None:
    assert "[DONE]" in post(attacked, ask(behaviour, stream=True)).text
    [call] = attacked.calls(behaviour)
    assert call.status is CallStatus.COMPLETE


@pytest.mark.limits
def test_the_logprobs_of_a_long_chunk_stall_nobody(attacked: Attacked) -> None:
    asked = ask("many_logprobs", stream=True, logprobs=True, top_logprobs=4)
    text = post(attacked, asked).text
    assert "[DONE]" in text
    assert text.count('"top_logprobs"') == 32_000
    [call] = attacked.calls("many_logprobs")
    assert call.status is CallStatus.COMPLETE


@pytest.mark.limits
@pytest.mark.parametrize("behaviour", ["endless_chunk", "chunk_extension"])
def test_chunks_that_cannot_be_are_refused_at_once(attacked: Attacked, behaviour: str) -> None:
    assert post(attacked, ask(behaviour, stream=True), timeout=60).status_code == 502


def test_a_reply_of_too_many_characters_is_ended(tmp_path: Path) -> None:
    with running(tmp_path, reply_characters="100000") as proxy:
        response = post(proxy, ask("endless_arguments", stream=True))
        assert "larger than 100000 characters (reply_characters)" in response.text
        assert len(response.content) < 1_000_000
        [call] = proxy.calls("endless_arguments")
        assert "limit_reply_characters" in [note.name for note in call.notes]


@pytest.mark.limits
def test_many_large_replies_at_once_are_ended_before_they_fill_the_memory(
    attacked: Attacked,
) -> None:
    def status(_: int) -> int:
        return post(attacked, ask("held_whole"), timeout=8).status_code

    statuses = []
    with ThreadPoolExecutor(30) as pool:
        for done in [pool.submit(status, number) for number in range(30)]:
            try:
                statuses.append(done.result())
            except httpx.ReadTimeout:
                statuses.append(0)
    room = Limits().in_flight_bytes // HELD_BYTES
    assert statuses.count(503) >= 30 - room
    assert statuses.count(0) >= 1
    assert attacked.events()["limit_in_flight_bytes"] >= 30 - room


def head(length: int) -> bytes:
    lines = f"host: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {length}"
    return f"POST {CHAT} HTTP/1.1\r\n{lines}\r\n\r\n".encode()


@pytest.mark.limits
def test_unfinished_bodies_are_refused_before_they_fill_the_memory(attacked: Attacked) -> None:
    length = 8 << 20
    with ExitStack() as stack:
        begun = [stack.enter_context(socket.create_connection(attacked.address)) for _ in range(40)]

        def push(connection: socket.socket) -> bytes:
            connection.settimeout(20)
            with suppress(OSError):
                connection.sendall(head(length) + b" " * (length - 1))
            try:
                return connection.recv(4096)
            except OSError:
                return b""

        with ThreadPoolExecutor(40) as pool:
            replies = list(pool.map(push, begun))
    assert sum(b" 503 " in reply for reply in replies) >= 20
    assert sum(b" 408 " in reply for reply in replies) >= 1


@pytest.mark.limits
def test_a_body_that_is_too_large_is_refused_before_it_is_read(attacked: Attacked) -> None:
    with socket.create_connection(attacked.address, timeout=20) as connection:
        connection.sendall(head(1 << 40))
        assert b" 413 " in connection.recv(4096)


@pytest.mark.limits
def test_the_largest_body_stalls_nobody(attacked: Attacked) -> None:
    text = "word " * (8_000_000 // 5)
    body = ask(text, stream=True)
    url = attacked.url + CHAT
    with httpx.stream("POST", url, headers=HEADERS, json=body, timeout=60) as got:
        assert got.status_code == 200


@pytest.mark.limits
@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(attacked: Attacked, sent: bytes) -> None:
    with socket.create_connection(attacked.address, timeout=20) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
    assert attacked.events()["limit_head_timeout_s"] == 1


@pytest.mark.limits
def test_a_body_that_does_not_come_is_a_408(attacked: Attacked) -> None:
    with socket.create_connection(attacked.address, timeout=20) as connection:
        connection.sendall(head(100) + b"{")
        reply = connection.recv(4096)
    assert b" 408 " in reply
    assert b"body_timeout" in reply or b"not whole within 2 s" in reply


@pytest.mark.limits
def test_too_many_connections_are_refused_and_counted(attacked: Attacked) -> None:
    with ExitStack() as stack:
        many = [stack.enter_context(socket.create_connection(attacked.address)) for _ in range(90)]
        time.sleep(1)
        told, _, _ = select.select(many, [], [], 0)
        assert 26 <= len(told) < 30  # Earlier tests may have left some open.
        assert all(each.recv(100).startswith(b"HTTP/1.1 503 ") for each in told)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert attacked.events()["limit_connections"] >= 26
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the proxy takes no connections again")


@pytest.mark.limits
def test_too_many_choices_are_refused(attacked: Attacked) -> None:
    response = post(attacked, ask("steady", n=1000))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


def test_the_page_on_deployment_lists_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    for one in fields(Limits):
        assert f"| `{one.name}` | {one.default} |" in page


def ended(one: Held, count: int) -> bool:
    try:
        one.add(count)
    except ApiError:
        return True
    return False


def test_a_call_that_is_ended_takes_no_other_with_it_while_its_record_is_written() -> None:
    everything = InFlight(100)
    calls = [Held(everything) for _ in range(4)]
    assert [ended(one, 30) for one in calls] == [False, False, False, True]
    assert not ended(calls[0], 5)
    for one in calls:
        one.release()
    assert (everything.bytes, everything.ending, everything.holders) == (0, 0, 0)


def test_calls_that_have_been_ended_and_not_let_go_hold_as_much_again_at_most() -> None:
    everything = InFlight(100)
    calls = [Held(everything) for _ in range(5)]
    sizes = (40, 61, 20, 80)
    assert [ended(*pair) for pair in zip(calls, sizes, strict=False)] == [False, True, False, True]
    calls[0].release()
    assert (everything.bytes, everything.ending) == (161, 141)
    assert ended(calls[4], 75), "95 bytes of calls that go on, and 236 in all"
