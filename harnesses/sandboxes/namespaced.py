"""Starts one process in namespaces of its own; run as a program by ``isolation.py``.

``namespaced.py STATUS_FD SETTINGS -- COMMAND …``. The process sees only itself and the processes
that it starts: process ids, ``/proc``, the mount table and System V's shared memory are its own.
When it ends, its namespace ends, and the kernel kills whatever it left, under any session or
environment. ``SETTINGS`` is JSON. With ``walls`` the process sees the files that :mod:`walls`
builds and starts in the folder ``directory``; otherwise it sees the machine's files and keeps its
capabilities. With ``way_out`` the network is its own too: a loopback with one port, from which
connections go to a Unix socket of the machine. The program uses the standard library only, since it
runs under ``python -I -S``.

A step that fails is written to ``STATUS_FD`` as JSON ``[step, errno]``; nothing is written when the
command was started.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
from fcntl import ioctl
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import walls  # type: ignore[import-not-found]

del sys.path[0]

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

Handlers = list[tuple[signal.Signals, Any]]

libc, called = walls.libc, walls.called


def main() -> None:
    status, settings, command = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[4:]
    os.set_inheritable(status, False)
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in IGNORED]
    try:
        enter(settings["way_out"] is not None)
        first = os.fork()
        if first == 0:
            serve(status, settings, command, before)
    except OSError as error:
        fail(status, error)
    os.close(status)
    os._exit(code_of(os.waitpid(first, 0)[1]))


def enter(network: bool) -> None:
    """Make namespaces for this process's children.

    Those of an ordinary user are in a user namespace.
    """
    uid, gid = os.getuid(), os.getgid()
    wanted = walls.CLONE_NEWPID | walls.CLONE_NEWNS | walls.CLONE_NEWIPC
    wanted |= CLONE_NEWNET if network else 0
    if uid == 0:
        called("unshare", libc.unshare(wanted))
        return
    called("unshare", libc.unshare(wanted | CLONE_NEWUSER))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def serve(status: int, settings: dict[str, Any], command: list[str], before: Handlers) -> None:
    """Be the first process of the namespace: start the command, reap orphans, and end with it."""
    try:
        called("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
        way_out = settings["way_out"]
        # The walls may hide its folder, which can lie below /tmp.
        keeper = None if way_out is None else load_keeper(way_out.pop("program"))
        if settings["walls"] is not None:
            walls.build(settings["walls"])
            os.chdir(settings["directory"])
        else:
            called("private mounts", libc.mount(b"none", b"/", None, walls.PRIVATE, None))
            walls.new_proc()
        if way_out is not None:
            open_way_out(status, keeper, **way_out)
        child = os.fork()
        if child == 0:
            if settings["walls"] is not None:
                walls.limit_capabilities()
            for number, handler in before:
                signal.signal(number, handler)
            try:
                os.execvpe(command[0], command, os.environ)  # noqa: S606
            except OSError as error:
                error.filename2 = "exec"
                fail(status, error)
    except OSError as error:
        fail(status, error)
    os.close(status)
    while True:
        ended, code = os.wait()
        if ended == child:
            os._exit(code_of(code))


def load_keeper(folder: str) -> Any:
    """Import ``keeper.py``, which forwards connections in a container, from its folder."""
    sys.path.insert(0, folder)
    import keeper  # type: ignore[import-not-found]

    del sys.path[0]
    return keeper


def open_way_out(status: int, keeper: Any, port: int, socket_path: str) -> None:
    """Start a process that forwards connections to a port of the new loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        error.filename2 = "network"
        raise
    if os.fork() == 0:
        os.close(status)
        forward(keeper, listener, socket_path)
    listener.close()


def forward(keeper: Any, listener: socket.socket, socket_path: str) -> None:
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, events in selector.select():
            if key.data is None:
                keeper.accept(selector, listener, socket_path, b"session\n")
            else:
                key.data.move(selector, events)


def fail(status: int, error: OSError) -> None:
    os.write(status, json.dumps([error.filename2 or "set-up", error.errno]).encode())
    os._exit(127)


def code_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
