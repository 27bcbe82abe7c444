"""The report of a process inside walls on its start, and the program that sends it.

``threshold.py`` comes before a command inside, and ``zygote.py`` enters walls by itself. Both
report over a socket, whose other end :class:`Entrance` has, and send the socket that listens in the
session's own network.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INNER_PORT: Final = 8484
"""Port of the loopback inside at which a session's URL is."""
_THRESHOLD: Final = Path(__file__).with_name("threshold.py").read_text()


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a process inside walls on its start."""

    text: str
    """``"\\n"`` from a process that starts its command; otherwise the reason why it does not."""
    process: int
    """Its process number on this machine."""
    listener: socket.socket | None
    """The socket that listens in the session's own network, if it has one."""

    @property
    def started(self) -> bool:
        return self.text == "\n"


class Entrance:
    """Bridle's end of the socket over which a process inside walls reports its start."""

    def __init__(self, connection: socket.socket) -> None:
        self._ours = connection
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._ours.setblocking(False)

    async def report(self) -> Report:
        """Wait until the command is about to start, or will not."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        number = self._ours.fileno()

        def note() -> None:
            if not arrived.done():
                arrived.set_result(None)

        loop.add_reader(number, note)
        try:
            await arrived
        finally:
            loop.remove_reader(number)
        said, extra, _, _ = self._ours.recvmsg(1024, socket.CMSG_SPACE(4) + socket.CMSG_SPACE(12))
        process, listener = 0, None
        for _, kind, data in extra:
            if kind == socket.SCM_RIGHTS:
                listener = socket.socket(fileno=struct.unpack("i", data[:4])[0])
            elif kind == socket.SCM_CREDENTIALS:
                process = struct.unpack("3i", data[:12])[0]
        return Report(said.decode("utf-8", "replace"), process, listener)

    def failure(self) -> OSError | None:
        """Return the error with which the command was not started, once it has ended."""
        try:
            said = self._ours.recv(64)
        except BlockingIOError:
            return None
        return OSError(int(said), os.strerror(int(said))) if said.isdigit() else None

    def close(self) -> None:
        self._ours.close()


def threshold(theirs: socket.socket, environment: int, network: bool) -> tuple[str, ...]:
    """Return the program that comes before a command inside, and reports its start.

    ``environment`` is a descriptor of :func:`environment_file`.
    """
    numbers = (theirs.fileno(), environment, INNER_PORT if network else 0)
    return (sys.executable, "-I", "-S", "-c", _THRESHOLD, *map(str, numbers))


def environment_file(environment: Mapping[str, str]) -> int:
    """Return a descriptor of a file in memory with an environment.

    Raise :class:`ValueError` for one that no process can have.
    """
    entries = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    if any(b"\0" in entry for entry in entries):
        raise ValueError("embedded null byte in the environment")
    number = os.memfd_create("environment")
    os.write(number, b"\0".join(entries))
    os.lseek(number, 0, os.SEEK_SET)
    return number
