"""A named function that scores, which runs in a process of its own for each session.

The process is a fork of one that has imported the function (``server.py``). It shares nothing with
the run or with other sessions, has bounds of time, CPU, memory and files, and ends with the
processes that it started. A function that crashes, hangs or exits costs its session its reward, and
nothing else. Verifiers and scorers are such functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from bridle.errors import BridleError
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.verifiers.delivery import (
    Delivery,
    FunctionFault,
    NoVerdict,
    Score,
    TaskUnfit,
    Verdict,
    VerifierError,
    verdict_of,
)
from bridle.harnesses.verifiers.function import FunctionVerifier, with_local_workspace
from bridle.harnesses.verifiers.server import PACKET, DeliveryInquiry, Inquiry
from bridle.keys import without_keys

log = logging.getLogger(__name__)

_START: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from bridle.harnesses.verifiers.server import main; main(int(sys.argv[1]))"
)
_START_S: Final = 120.0
"""Maximum seconds for the import of a function."""
_ENDING_S: Final = 10.0
"""Maximum seconds for the end of a process that was killed."""
_REPORT: Final = 1 << 20
"""Maximum bytes of a function's report."""
_KINDS: Final = {one.__name__: one for one in (FunctionFault, NoVerdict, TaskUnfit)}


class NotSeparate(BridleError):
    """The function cannot run in a process of its own; the message has the reason."""


class SeparateProcess:
    """The process of a named function, which is started with the first question."""

    def __init__(self, kind: str, reference: str, options: Mapping[str, Any]) -> None:
        """Take the function's own ``options``, without any if there are none.

        ``kind`` is ``verifier`` or ``scorer``.
        """
        own = {reference.rpartition(":")[2]: dict(options)} if options else {}
        self._started_with = (kind, reference, own)
        self._server: _Server | None = None
        self._starting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
        self._starting = weakref.WeakKeyDictionary()

    async def ask(self, inquiry: Inquiry) -> Verdict:
        """Return the function's rewards.

        Raise :class:`NotSeparate` if it cannot run in another process, and
        :class:`VerifierError` if it returns no rewards within its bounds.
        """
        try:
            pickled = pickle.dumps(inquiry)
        except Exception as error:
            raise NotSeparate(f"its argument cannot be sent: {error}") from error
        async with self._starting.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._server is None or self._server.lost:
                self._server = await _Server.start(*self._started_with)
            server = self._server
        return await server.judge(pickled, inquiry.bounds)


class SeparateFunction:
    """A verifier from the plain function that ``FILE.py:NAME`` or ``MODULE:NAME`` names.

    Where the function cannot run in another process, because importing it fails there or starts
    threads, or because a task has objects that cannot be sent, ``within`` verifies instead, and the
    reason is logged once.
    """

    def __init__(
        self, reference: str, options: Mapping[str, Any], within: FunctionVerifier
    ) -> None:
        """Take the function's own ``options``, without any if there are none."""
        self.reference = reference
        self._process = SeparateProcess("verifier", reference, options)
        self._within = within
        self._why_not: str | None = None

    async def __call__(self, delivery: Delivery) -> Verdict:
        delivery = await with_local_workspace(delivery)
        if self._why_not is None:
            try:
                return await self._process.ask(
                    DeliveryInquiry(
                        delivery.task,
                        delivery.answer,
                        delivery.workspace,
                        delivery.exit_code,
                        delivery.sandbox.directory,
                        delivery.bounds,
                    )
                )
            except NotSeparate as error:
                self._why_not = str(error)
                log.warning(
                    "verifier_not_separate: %s runs in the run's own process, without bounds of "
                    "CPU and memory: %s",
                    *(self.reference, error),
                )
        return await self._within(delivery)


@dataclass
class _Report:
    """The lines that a process wrote, and the server after it."""

    value: dict[str, Any] | None = None
    status: int | None = None
    _lines: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> bool:
        """Add bytes, and return whether the report is complete."""
        self._lines += data
        if len(self._lines) > _REPORT:
            raise NoVerdict(f"the verifier's report has more than {_REPORT} bytes")
        *lines, rest = self._lines.split(b"\n")
        self._lines = bytearray(rest)
        for line in lines:
            read: dict[str, Any] = msgspec.json.decode(line)
            if "status" in read:
                self.status = read["status"]
            else:
                self.value = read
        return self.status is not None

    def scores(self, bounds: Bounds) -> Verdict:
        """Return the scores. Raise the error that there is instead."""
        value = self.value
        if value is None:
            raise NoVerdict(_end(self.status or 0, bounds))
        if "scores" in value:
            given = value["scores"]
            placed = isinstance(given, list)
            return msgspec.convert(given, tuple[Score, ...]) if placed else verdict_of(given)
        if value["kind"] == "unread":
            raise NotSeparate(f"a task cannot be read there: {value['error']}")
        raise _KINDS.get(value["kind"], VerifierError)(value["error"])


def _end(status: int, bounds: Bounds) -> str:
    if status == -signal.SIGXCPU:
        return (
            f"the verifier took more than {bounds.verifier_s:g} s of CPU (agent.bounds.verifier_s)"
        )
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return f"the verifier's process ended with {how} before its verdict"


class _Server:
    """This process's end of the socket to the process that has imported a function."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.lost = False
        self._control = control
        self._numbers = itertools.count(1)
        weakref.finalize(self, _close, control, process)

    @classmethod
    async def start(cls, kind: str, reference: str, options: Mapping[str, Any]) -> _Server:
        """Start the process. Raise :class:`NotSeparate` if the function cannot run there."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = await asyncio.to_thread(
                subprocess.Popen,
                [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
                env=without_keys(os.environ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        server = cls(ours, process)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(ours, pickle.dumps((kind, reference, options)))
        try:
            greeting = await asyncio.wait_for(loop.sock_recv(ours, PACKET), _START_S)
        except TimeoutError as error:
            raise NotSeparate(f"importing it took more than {_START_S:g} s") from error
        except ConnectionError:
            greeting = b""
        if greeting != b"\n":
            raise NotSeparate(greeting.decode("utf-8", "replace") or "its import ends the process")
        return server

    async def judge(self, inquiry: bytes, bounds: Bounds) -> Verdict:
        """Return the function's scores. Raise :class:`VerifierError` if there are none."""
        ours, theirs = socket.socketpair()
        identifier = next(self._numbers)
        with ours:
            ours.setblocking(False)
            with theirs:
                self._send(f"run {identifier}", theirs)
            report = _Report()
            reading = asyncio.ensure_future(_exchange(ours, inquiry, report))
            try:
                await asyncio.wait_for(asyncio.shield(reading), bounds.verifier_s or None)
            except TimeoutError as error:
                self._send(f"kill {identifier}")
                await asyncio.wait({reading}, timeout=_ENDING_S)
                raise NoVerdict(
                    f"the verifier took more than {bounds.verifier_s:g} s (agent.bounds.verifier_s)"
                ) from error
            finally:
                if report.status is None:
                    with contextlib.suppress(VerifierError):
                        self._send(f"kill {identifier}")
                reading.cancel()
        if report.status is None:
            self.lost = True
            raise VerifierError("the process of the verifier was lost")
        return report.scores(bounds)

    def _send(self, packet: str, passed: socket.socket | None = None) -> None:
        descriptors = [] if passed is None else [passed.fileno()]
        try:
            socket.send_fds(self._control, [packet.encode()], descriptors)
        except OSError as error:
            self.lost = True
            raise VerifierError(f"the process of the verifier was lost: {error}") from error


async def _exchange(connection: socket.socket, inquiry: bytes, report: _Report) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(connection, inquiry)
        connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError):
        while data := await loop.sock_recv(connection, 1 << 16):
            if report.add(data):
                return


def _close(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
