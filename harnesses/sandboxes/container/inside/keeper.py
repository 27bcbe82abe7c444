"""The first process of a session's container, which forwards to the session's URL.

It also ends all other processes. It runs as root under the Python that is mounted with the harness,
with the standard library only. It connects to the relay outside (``relay.py``) by the mounted Unix
socket. Connections to a port of the loopback are forwarded there. Orphans are reaped. The control
connection asks for signals to all processes or to one user's, and for directories; when it ends, so
does the container.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import selectors
import shutil
import signal
import socket
import sys

CHUNK = 1 << 16


def main() -> None:
    settings = json.loads(sys.argv[1])
    uid, gid = user_of(settings["user"])
    for path in settings["directories"]:
        make(path, uid, gid)
    control = connect(settings["socket"], b"control\n")
    # The agent may be root here too. Signals that the first process does not handle do not reach it
    # from inside, and a process that is not dumpable is not traced without a further capability.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    refuse_traces()
    selector = selectors.DefaultSelector()
    for greeting, port in settings["listen"].items():
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, greeting)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    selector.register(reading, selectors.EVENT_READ, reap)
    selector.register(control, selectors.EVENT_READ, obey)
    control.sendall(json.dumps({"uid": uid, "gid": gid}).encode() + b"\n")
    while True:
        for key, events in selector.select():
            if isinstance(key.data, Flow):
                key.data.move(selector, events)
            elif isinstance(key.data, str):
                accept(selector, key.fileobj, settings["socket"], key.data.encode() + b"\n")
            else:
                key.data(key.fileobj)


def refuse_traces() -> None:
    """Let no process of the container trace this one, nor read its memory or open files."""
    with contextlib.suppress(ImportError, OSError):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def user_of(name: str) -> tuple[int, int]:
    """Return the numbers of the user and group that ``name`` states.

    The forms are ``user``, ``uid`` and ``user:group``. An empty name means root.
    """
    user, _, group = name.partition(":")
    if not user:
        return 0, 0
    if user.isdigit():
        uid = gid = int(user)
        with contextlib.suppress(KeyError):
            gid = pwd.getpwuid(uid).pw_gid
    else:
        entry = pwd.getpwnam(user)
        uid, gid = entry.pw_uid, entry.pw_gid
    if group:
        gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    return uid, gid


def make(path: str, uid: int, gid: int) -> None:
    """Make a directory of the user's; one that the image has stays as it is."""
    if os.path.isdir(path):
        return
    os.makedirs(path)
    os.chown(path, uid, gid)


def connect(path: str, greeting: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(greeting)
    return connection


def accept(selector, listener, path: str, greeting: bytes) -> None:  # type: ignore[no-untyped-def]
    with contextlib.suppress(BlockingIOError):
        inner, _ = listener.accept()
        try:
            outer = connect(path, greeting)
        except OSError:
            inner.close()
            return
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        inner.setblocking(False)
        outer.setblocking(False)
        one, other = Flow(inner), Flow(outer)
        one.other, other.other = other, one
        selector.register(inner, selectors.EVENT_READ, one)
        selector.register(outer, selectors.EVENT_READ, other)


class Flow:
    """One end of a forwarded connection, and the bytes that wait to be written to it."""

    other: Flow

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.waiting = b""
        self.ended = False
        """True if nothing more comes from this end."""
        self.closing = False
        """True if this end is shut down once ``waiting`` is written."""
        self.shut = False

    def move(self, selector: selectors.BaseSelector, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = self.end.recv(CHUNK)
                self.ended = not data
                self.other.waiting += data
                self.other.closing = self.ended
            for flow in (self, self.other):
                flow.write()
        except BlockingIOError:
            pass
        except OSError:
            self.close(selector)
            return
        if self.ended and self.other.ended and self.shut and self.other.shut:
            self.close(selector)
            return
        for flow in (self, self.other):
            flow.watch(selector)

    def write(self) -> None:
        if self.waiting:
            with contextlib.suppress(BlockingIOError):
                self.waiting = self.waiting[self.end.send(self.waiting) :]
        if self.closing and not self.waiting and not self.shut:
            self.shut = True
            self.end.shutdown(socket.SHUT_WR)

    def watch(self, selector: selectors.BaseSelector) -> None:
        events = selectors.EVENT_WRITE if self.waiting else 0
        if not self.ended and len(self.other.waiting) < CHUNK:
            events |= selectors.EVENT_READ
        known = self.end in selector.get_map()
        if events and known:
            selector.modify(self.end, events, self)
        elif events:
            selector.register(self.end, events, self)
        elif known:
            selector.unregister(self.end)

    def close(self, selector: selectors.BaseSelector) -> None:
        for flow in (self, self.other):
            if flow.end.fileno() >= 0 and flow.end in selector.get_map():
                selector.unregister(flow.end)
            flow.end.close()


def reap(reading: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(reading, CHUNK)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def obey(control: socket.socket) -> None:
    try:
        lines = control.recv(CHUNK).splitlines()
    except OSError:
        lines = []
    if not lines:
        os._exit(0)
    for line in lines:
        asked = json.loads(line)
        if asked["do"] == "kill":
            kill(asked["signal"], asked["uid"])
        elif asked["do"] == "make":
            for path in asked["paths"]:
                make(path, asked["uid"], asked["uid"])
                os.chmod(path, 0o700)
        else:
            shutil.rmtree(asked["path"], ignore_errors=True)
        control.sendall(b"done\n")


def kill(number: int, uid: int | None) -> None:
    """Signal every process of the container but this one, or every process of a user."""
    if uid is not None:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            return
        os.setgid(uid)
        os.setuid(uid)
    # Again: a process may be starting another while the signal goes round.
    for _ in range(5):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, number)
        if number != signal.SIGKILL:
            break
    if uid is not None:
        os._exit(0)


if __name__ == "__main__":
    main()
