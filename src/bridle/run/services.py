"""Bridle's engine and proxy as child processes of a command."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import IO, Self

import orjson

from bridle.errors import BridleError
from bridle.keys import without_keys
from bridle.run.environment import without_rank

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
LAUNCHER_VARIABLE = "BRIDLE_LAUNCHER"
"""The variable with the process id of the command that runs a service for itself."""


class ServiceFailed(BridleError):
    """A child process did not come up; the message ends with the last lines of its log."""


class Service:
    """``python -m bridle ARGUMENTS`` as a child process until the context ends.

    The command must print one JSON line with its ``url`` once it serves (``--json``). It runs in a
    process group of its own, so that Ctrl-C at the terminal reaches only this process, which then
    ends the child in order. An engine or a proxy ends by itself if this process is killed. Its
    other output goes to ``log``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        keys: Mapping[str, str | None] = MappingProxyType({}),
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepare the process.

        ``keys`` are the keys that it gets, by environment variable; none of this process's own is
        passed on. Each is in an open file that has no name, so that no environment holds it.
        """
        self._arguments = tuple(arguments)
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._keys = {name: key for name, key in keys.items() if key is not None}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        inherited = without_keys(without_rank(os.environ))
        with ExitStack() as opened:
            log = opened.enter_context(open(self._log, "ab", opener=_private))
            files = {name: opened.enter_context(_file_of(key)) for name, key in self._keys.items()}
            self._process = subprocess.Popen(
                # -P: no file of the folder it starts in replaces a module.
                [sys.executable, "-P", "-m", "bridle", *self._arguments, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=[file.fileno() for file in files.values()],
                env={
                    **inherited,
                    **{f"{name}_FILE": f"/dev/fd/{one.fileno()}" for name, one in files.items()},
                    "OMP_NUM_THREADS": "1",
                    LAUNCHER_VARIABLE: str(os.getpid()),
                },
            )
        try:
            self.url = str(orjson.loads(self._first_line())["url"])
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the service is not running")
        return self._process.pid

    def _first_line(self) -> bytes:
        """Return the first line of output.

        It is read in a thread because a child may hang without printing or ending.
        """
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("the service is not running")
        lines: queue.Queue[bytes] = queue.Queue()
        reader = threading.Thread(
            target=_read_lines, args=(self._process.stdout, lines), daemon=True
        )
        reader.start()
        try:
            line = lines.get(timeout=self._start_timeout_s)
        except queue.Empty:
            line = b""
        if not line:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise ServiceFailed(f"`bridle {' '.join(self._arguments)}` did not start:\n{tail}")
        return line

    def _stop(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Put the first line into ``lines``, and read the rest.

    Reading the rest keeps the child from blocking on it.
    """
    lines.put(stream.readline())
    while stream.read(65536):
        pass


def _file_of(key: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(key.encode())
    file.seek(0)
    return file


def _private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read when it is made."""
    return os.open(path, flags, 0o600)
