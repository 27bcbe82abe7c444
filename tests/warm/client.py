"""Stands in for ``python``: ``[-P] -m bridle …`` runs in a fork of the warm process.

The fixture ``warm_python`` writes a copy that has ``PYTHON`` and ``ADDRESS`` filled in.
Everything else that is asked of a Python is run by the real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

PYTHON = "@PYTHON@"
ADDRESS = "@ADDRESS@"
LOST = 70
"""The exit code when the warm process has ended."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    safe_path = sys.argv[1:2] == ["-P"]
    options = sys.argv[2:] if safe_path else sys.argv[1:]
    if options[:2] != ["-m", "bridle"]:
        os.execv(PYTHON, [PYTHON, *sys.argv[1:]])  # noqa: S606
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(ADDRESS)
    opened = {
        name: int(value.removeprefix("/dev/fd/"))
        for name, value in os.environ.items()
        if value.startswith("/dev/fd/")
    }
    ignored = [each for each in FORWARDED if signal.getsignal(each) is signal.SIG_IGN]
    request = {
        "arguments": options[2:],
        "safe_path": safe_path,
        "environment": dict(os.environ),
        "opened": list(opened),
        "folder": os.getcwd(),
        "ignored": ignored,
        "pid": os.getpid(),
    }
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "big")], [0, 1, 2, *opened.values()])
    connection.sendall(body)
    for number in {*FORWARDED} - {*ignored}:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    for descriptor in (0, 1, 2, *opened.values()):
        os.close(descriptor)
    answer = connection.recv(4)
    code = int.from_bytes(answer, "big", signed=True) if answer else LOST
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
