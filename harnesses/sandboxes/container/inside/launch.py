"""Starts one process in a session's container, as the user that ``docker exec`` gives it.

The launch comes as JSON on the standard input, so that no key stands in a command line. The result
goes to the relay outside, because the exit codes 125 to 127 of ``docker exec`` may be its own or
the process's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys


def main() -> None:
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        os.chdir(asked["cwd"])
    except OSError:
        report(asked, {"error": "directory"})
        return
    # Nobody traces the launcher, who has the token of the result; the launched process is another.
    with contextlib.suppress(ImportError, OSError):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.environ.clear()
        os.environ.update(asked["env"])
        try:
            os.execvpe(asked["argv"][0], asked["argv"], asked["env"])  # noqa: S606
        except (OSError, ValueError) as error:
            os.write(writing, json.dumps([getattr(error, "errno", 0) or 0, str(error)]).encode())
        os._exit(127)
    os.close(writing)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with os.fdopen(reading, "rb") as pipe:
        problem = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if problem:
        number, why = json.loads(problem)
        report(asked, {"error": "start", "errno": number, "why": why})
    else:
        report(asked, {"code": code})


def report(asked: dict[str, object], message: dict[str, object]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(asked["socket"]))
        connection.sendall(f"report {asked['token']} {json.dumps(message)}\n".encode())
        connection.recv(1)


if __name__ == "__main__":
    main()
