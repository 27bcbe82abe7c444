"""Forks ``bridle`` commands from a process that has already imported what they import.

``python server.py SOCKET CLIENT`` prints a line when it listens on ``SOCKET``. A user of it sends
:data:`USER` and stays connected; the process ends with its last user. For each connection of
``CLIENT`` (see ``client.py``) it forks a child that takes over the client's streams, arguments,
environment and folder and runs ``python -m bridle``. The client reports the child's end as its own.
The child is killed when the client is.

The child differs from a process of its own in two ways: its process number is not the client's,
and modules that read the environment while they are imported have read this process's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn, cast

PRELOADED = (
    "bridle.cli.program",
    "bridle.engine.embedded",
    "bridle.engine.embedded.model",
    "bridle.engine.scripted",
    "bridle.engine.vllm",
    "bridle.engine.vllm.launch",
    "bridle.proxy.server",
    "bridle.run.local",
    "bridle.run.rollouts",
    "bridle.run.stack",
    "bridle.run.training",
    "bridle.trainer.learner.ranks",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)
HEADER_BYTES = 4
STREAMS = 16
"""Maximum open files of a client that its fork gets: its streams, and those that variables name."""
USER = bytes(HEADER_BYTES)
"""The request of a connection that keeps this process alive."""


def preload() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a fork would lack {threads - 1} threads that the imports have started"
    gc.collect()
    gc.freeze()


def main(address: str, client: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload()
    server = Server(address)
    print("ready", flush=True)
    child = server.serve()
    if child is not None:
        become(*child, client)


class Server:
    """The listener, the forks that run for clients, and the users that keep this process alive."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.wakeup = socket.socketpair()
        for end in self.wakeup:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup[1].fileno(), warn_on_full_buffer=False)
        self.selector = selectors.DefaultSelector()
        for source in (self.listener, self.wakeup[0]):
            self.selector.register(source, selectors.EVENT_READ)
        self.clients: dict[int, socket.socket] = {}
        self.users: set[socket.socket] = set()

    def serve(self) -> tuple[dict[str, Any], list[int], socket.socket] | None:
        """Serve until the last user leaves. In a fork, return the request that it is for."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.wakeup[0]:
                    with contextlib.suppress(BlockingIOError):
                        self.wakeup[0].recv(4096)
                elif key.fileobj is self.listener:
                    if (child := self.connect()) is not None:
                        return child
                else:
                    self.leave(cast(socket.socket, key.fileobj))
                    if not self.users:
                        return None
            self.report_ended()

    def leave(self, user: socket.socket) -> None:
        self.selector.unregister(user)
        self.users.discard(user)
        user.close()

    def connect(self) -> tuple[dict[str, Any], list[int], socket.socket] | None:
        """Accept a user, or fork for a client. Return its request in the fork alone."""
        connection, _ = self.listener.accept()
        request, streams = receive(connection)
        if request is None:
            connection.close()
            return None
        if not request:
            self.users.add(connection)
            self.selector.register(connection, selectors.EVENT_READ)
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self.selector.close()
            for inherited in (self.listener, *self.wakeup, *self.clients.values(), *self.users):
                inherited.close()
            return request, streams, connection
        self.clients[pid] = connection
        for stream in streams:
            os.close(stream)
        return None

    def report_ended(self) -> None:
        """Report each child that has ended to its client, and forget it."""
        while self.clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError), self.clients.pop(pid) as connection:
                connection.sendall(code.to_bytes(4, "big", signed=True))


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a client's request and its three streams.

    The request is None if the client is gone already, and empty if it is a user.
    """
    header, streams, _, _ = socket.recv_fds(connection, HEADER_BYTES, STREAMS)
    if len(header) < HEADER_BYTES:
        return None, streams
    if header == USER:
        return {}, streams
    size, body = int.from_bytes(header, "big"), b""
    while len(body) < size:
        piece = connection.recv(size - len(body))
        if not piece:
            return None, streams
        body += piece
    return json.loads(body), streams


def become(
    request: dict[str, Any], streams: list[int], connection: socket.socket, client: str
) -> None:
    """Turns this fork into the process that was asked for, and runs it to its end."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for target, stream in enumerate(streams[:3]):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, number in zip(request["opened"], streams[3:], strict=True):
        os.environ[name] = f"/dev/fd/{number}"
    os.chdir(request["folder"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")  # noqa: SIM115
    sys.stdout = writer(1, unbuffered)
    sys.stderr = writer(2, True, errors="backslashreplace")
    sys.argv = ["bridle", *request["arguments"]]
    sys.executable = client
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = [] if request["safe_path"] else [request["folder"]]
    sys.path[:1] = [*first, *(entry for entry in named if entry not in sys.path)]
    os.getppid = lambda: parent_of(request["pid"])
    for name in ("numpy.random", "torch"):
        sys.modules[name].seed()
    threading.Thread(target=follow, args=(connection,), daemon=True).start()
    code = 1
    try:
        runpy.run_module("bridle", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            code = stop.code or 0
        else:
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as the interpreter does, last
        sys.excepthook(*sys.exc_info())
    leave(code)


def leave(code: int) -> NoReturn:
    """End the interpreter without its last part.

    Tearing down a thousand modules takes half a second.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code & 0xFF)


def writer(descriptor: int, unbuffered: bool, errors: str = "strict") -> io.TextIOWrapper:
    buffered = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - it lives as long as we do
    by_line = unbuffered or os.isatty(descriptor)
    return io.TextIOWrapper(buffered, encoding="utf-8", errors=errors, line_buffering=by_line)


def parent_of(pid: int) -> int:
    """The parent of the client, which stands for ours; 0 when the client is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


def follow(connection: socket.socket) -> None:
    """Raises the signals that the client has received, and ends this process with the client."""
    while numbers := connection.recv(64):
        for number in numbers:
            os.kill(os.getpid(), number)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
