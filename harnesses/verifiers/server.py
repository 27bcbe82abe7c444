"""The process of a named function that scores: it imports it once, and forks for each session.

It speaks over an inherited socket of packets. The first packet has the set that the function is of
(verifiers or scorers), its name and its options; the reply is an empty line, or the reason why the
function cannot run here. Then come ``run ID``, with a socket, and ``kill ID``. The child of a run
reads an :class:`Inquiry` from the socket to its end, and writes one line of JSON: ``{"scores":
…}``, which are numbers by name or rewards with their places, or ``{"error": …, "kind": …}``. When
it has ended, so have the processes of its group, and this process adds ``{"status": …}``, its exit
code, ``-n`` after signal n. When the first socket closes, all ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import inspect
import json
import math
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import msgspec

from bridle.harnesses.sandboxes.base import Launch, ProcessResult
from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.sandboxes.folder import Folder
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers.delivery import (
    Delivery,
    NoVerdict,
    VerifierError,
    fault_of,
    verdict_of,
)
from bridle.registry import Registry

PACKET: Final = 1 << 16
"""Maximum bytes of a packet."""
OPEN_FILES: Final = 1024
"""Maximum number of files that a function has open at a time."""
_MIB: Final = 1 << 20
_ERROR: Final = 2000
"""Maximum characters of an error message."""


class Inquiry(Protocol):
    """A question that crosses to another process."""

    @property
    def bounds(self) -> Bounds: ...

    def argument(self) -> Any:
        """Return the function's argument."""


@dataclass(frozen=True, slots=True)
class DeliveryInquiry:
    """The part of a delivery that crosses to another process."""

    task: Task
    answer: str
    workspace: Path
    exit_code: int | None
    directory: Path
    bounds: Bounds

    def argument(self) -> Delivery:
        work = (self.task, self.answer, self.workspace, self.exit_code, Left(self.directory))
        return Delivery(*work, bounds=self.bounds)


class Left(Folder):
    """A session's folder after its agent has ended, without a way to run commands in it."""

    async def exec(self, launch: Launch) -> ProcessResult:
        raise NoVerdict(
            f"a verifier that runs {launch.argv[0]} in the sandbox is an async function: write "
            "`async def`"
        )


def main(number: int) -> None:
    """Serve the socket with a number until it closes."""
    control = socket.socket(fileno=number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind, reference, options = pickle.loads(control.recv(PACKET))  # noqa: S301 - the run's own
    try:
        function = Registry[Any](kind, f"bridle.{kind}s").configured(reference, options)
    except Exception as error:  # noqa: BLE001 - any code can raise anything; it is reported
        control.send(f"{type(error).__name__}: {error}".encode()[:PACKET])
        return
    if (threads := len(os.listdir("/proc/self/task")) - 1) > 0:
        control.send(f"its import starts {threads} threads, which a fork would lack".encode())
        return
    gc.collect()
    # Children share the pages of these objects until someone writes to them; the collector would.
    gc.freeze()
    control.send(b"\n")
    _Server(control, function).serve()


class _Server:
    """The loop over packets of the socket and ends of children."""

    def __init__(self, control: socket.socket, function: Callable[[Any], Any]) -> None:
        self._control, self._function = control, function
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """Ids and sockets of the children that have not been reaped, by process number."""
        self._woken, self._wakeup = os.pipe()
        for one in (self._woken, self._wakeup):
            os.set_blocking(one, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        selector = selectors.PollSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                elif not self._receive():
                    for process in self._children:
                        _kill_group(process)
                    return
            self._reap()

    def _receive(self) -> bool:
        """Handle a packet. Return False when the other side is gone."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
        except ConnectionError:
            return False
        verb, _, identifier = packet.decode().partition(" ")
        if verb == "run":
            self._run(int(identifier), socket.socket(fileno=descriptors[0]))
        elif verb == "kill":
            for process, (each, _) in self._children.items():
                if each == int(identifier):
                    _kill_group(process)
        return bool(packet)

    def _run(self, identifier: int, connection: socket.socket) -> None:
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._control.close()
            for _, other in self._children.values():
                other.close()
            judge(self._function, connection)
        with contextlib.suppress(OSError):  # The child does the same; the first one counts.
            os.setpgid(process, process)
        self._children[process] = identifier, connection

    def _reap(self) -> None:
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # The number is still the child's, and so is the group's.
            _kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            _, connection = self._children.pop(ended.si_pid)
            report = {"status": os.waitstatus_to_exitcode(status)}
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.sendall(json.dumps(report).encode() + b"\n")


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def judge(function: Callable[[Any], Any], connection: socket.socket) -> NoReturn:
    """Read an inquiry, write the function's scores or its error, and end the process."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    code = 1
    try:
        with connection.makefile("rb") as given:
            report = _report(function, given.read())
        connection.sendall(json.dumps(report).encode() + b"\n")
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)


def _report(function: Callable[[Any], Any], given: bytes) -> dict[str, Any]:
    try:
        inquiry: Inquiry = pickle.loads(given)  # noqa: S301 - the run's own
    except Exception as error:  # noqa: BLE001 - a task may have objects of any class
        return {"error": f"{type(error).__name__}: {error}"[:_ERROR], "kind": "unread"}
    try:
        hold(inquiry.bounds)
        judgement = function(inquiry.argument())
        if inspect.isawaitable(judgement):
            judgement = asyncio.run(_awaited(judgement))
        return {"scores": msgspec.to_builtins(verdict_of(judgement))}
    except VerifierError as error:
        return {"error": str(error)[:_ERROR], "kind": type(error).__name__}
    except BaseException as error:  # noqa: BLE001 - `sys.exit` ends the verifier alone
        exceeded = _exceeded(error, inquiry.bounds)
        failure = NoVerdict(exceeded) if exceeded else fault_of(function, error)
        return {"error": str(failure)[:_ERROR], "kind": type(failure).__name__}


async def _awaited(judgement: Any) -> Any:
    return await judgement


def hold(bounds: Bounds) -> None:
    """Bound this process: its time on the CPU, its memory, its files."""
    page = os.sysconf("SC_PAGE_SIZE")
    present = int(Path("/proc/self/statm").read_text().split()[0]) * page
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: OPEN_FILES}
    if bounds.verifier_s:
        limits[resource.RLIMIT_CPU] = math.ceil(bounds.verifier_s)
    if bounds.memory_mb:
        limits[resource.RLIMIT_AS] = present + bounds.memory_mb * _MIB
    if bounds.disk_mb:
        limits[resource.RLIMIT_FSIZE] = bounds.disk_mb * _MIB
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (soft, hard))


def _exceeded(error: BaseException, bounds: Bounds) -> str | None:
    """Return the bound that caused an error, in words, or ``None`` if none did."""
    if isinstance(error, MemoryError):
        return f"the verifier took more than {bounds.memory_mb} MiB (agent.bounds.memory_mb)"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        most = f"{bounds.disk_mb} MiB (agent.bounds.disk_mb)"
        return f"the verifier wrote a file of more than {most}"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"the verifier opened more than {OPEN_FILES} files at a time"
    return None
