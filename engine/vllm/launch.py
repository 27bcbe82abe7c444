"""vLLM as a supervised child process.

:class:`VllmServer` starts vLLM in a process group of its own, waits until it serves, starts it
again when it dies, and takes the whole group down at the end. A restart begins with the weights
that were served last: the worker writes their directory and policy version down at each reload
(``inside/bridle_worker.py``). When they are no longer on disk, or not the files that were loaded,
vLLM stays down: serving other weights under the same version would falsify every record after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from engine.client import EngineError
from engine.vllm.control import VllmControl
from engine.vllm.flags import VllmOptions, command, environment
from engine.vllm.installation import Installation, VllmError, find_installation

POLL_SECONDS: Final = 0.2
STOP_SECONDS: Final = 10.0
"""Between asking vLLM's processes to end and ending them."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a vLLM serves."""

    directory: Path
    version: str | None
    """Policy version; ``None`` until somebody has said it."""
    files: tuple[tuple[str, int, int], ...]
    """Name, size and modification time (ns) of each weight file when it was noted."""


class VllmServer:
    """One vLLM on this machine; a context manager that starts and stops it.

    ``run_dir`` gets ``vllm.log`` and ``served.json``. With ``restarts`` above 0 a watching thread
    starts vLLM again after it died, that many times in a row without an hour of service between;
    ``on_event`` hears about each death, restart and refusal, from that thread.
    """

    def __init__(
        self,
        model_dir: str | Path,
        run_dir: str | Path,
        *,
        options: VllmOptions | None = None,
        python: str | Path | None = None,
        version: int | None = None,
        restarts: int = 3,
        ready_timeout: float = 600.0,
        on_event: Callable[[str], None] = lambda _event: None,
    ) -> None:
        self.options = options or VllmOptions()
        self.installation: Installation = find_installation(python)
        self.port = self.options.port or _free_port(self.options.host)
        self.log = Path(run_dir) / "vllm.log"
        self.started_in: float | None = None
        """Seconds from the last start until it served."""
        self._first = noted(Path(model_dir).absolute(), None if version is None else str(version))
        self._served_file = Path(run_dir).absolute() / "served.json"
        self._restarts = restarts
        self._ready_timeout = ready_timeout
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._output = 0
        """Where in the log the output of the running vLLM begins."""
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._refusal: VllmError | None = None

    @property
    def base_url(self) -> str:
        host = self.options.host
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}"  # noqa: S104

    @property
    def pid(self) -> int | None:
        """Process id of the API server, which leads the process group."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start vLLM and return when it serves; raises :class:`VllmError` when it does not."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._served_file.unlink(missing_ok=True)
        self._stopping.clear()
        self._launch(self._first)
        if self._restarts > 0:
            self._watcher = threading.Thread(target=self._watch, name="vllm watcher", daemon=True)
            self._watcher.start()

    def stop(self) -> None:
        """End vLLM and all its processes; returns when they are gone."""
        self._stopping.set()
        self._end_group()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def wait_ready(self, timeout: float = 600.0) -> None:
        """Return when vLLM serves, also again after a death; raises :class:`VllmError`."""
        if not self._ready.wait(timeout):
            raise VllmError(f"vLLM did not serve within {timeout:.0f} s; see {self.log}")
        if self._refusal is not None:
            raise self._refusal

    def served(self) -> Served:
        """What is served now, or will be after a restart."""
        try:
            note = json.loads(self._served_file.read_text())
        except FileNotFoundError:
            return self._first
        files = tuple((name, size, changed) for name, size, changed in note["files"])
        return Served(Path(note["directory"]), note["version"], files)

    def _launch(self, served: Served) -> None:
        started = time.monotonic()
        arguments = command(self.installation, served.directory, self.options, self.port)
        variables = environment(
            self.installation, self.options, self._served_file, dict(os.environ)
        )
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(arguments)}\n".encode())
            log.flush()
            self._output = log.tell()
            self._process = subprocess.Popen(
                arguments,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await_health(self._process)
            self._note_version(served)
        except BaseException:
            self._end_group()
            raise
        self.started_in = time.monotonic() - started
        self._ready.set()

    def _await_health(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._ready_timeout
        with VllmControl(self.base_url, timeout=5.0) as control:
            while not control.healthy():
                status = process.poll()
                if self._stopping.is_set():
                    raise VllmError("vLLM was stopped while it started")
                if status is not None:
                    cause = _last_error(self.log, self._output)
                    raise VllmError(f"vLLM ended with status {status}: {cause} (see {self.log})")
                if time.monotonic() > deadline:
                    raise VllmError(
                        f"vLLM did not serve within {self._ready_timeout:.0f} s; see {self.log}, "
                        "or allow more time"
                    )
                time.sleep(POLL_SECONDS)

    def _note_version(self, served: Served) -> None:
        """A fresh vLLM has forgotten the policy version of its weights; tell it."""
        if served.version is not None:
            with VllmControl(self.base_url) as control:
                control.stamp(int(served.version))

    def _watch(self) -> None:
        """Start vLLM again whenever it ends by itself."""
        left, process = self._restarts, self._process
        while process is not None:
            began = time.monotonic()
            status = process.wait()
            self._ready.clear()
            if self._stopping.is_set():
                return
            self._end_group()
            if time.monotonic() - began > 3600:
                left = self._restarts
            self._on_event(
                f"vLLM ended with status {status}: {_last_error(self.log, self._output)}"
            )
            try:
                if left == 0:
                    raise VllmError(f"vLLM keeps dying; see {self.log}")
                left -= 1
                served = self.served()
                require_unchanged(served)
                self._launch(served)
            except (VllmError, EngineError) as error:
                if not self._stopping.is_set():
                    self._refusal = VllmError(f"vLLM was not restarted: {error}")
                    self._on_event(str(self._refusal))
                self._ready.set()
                return
            self._on_event(
                f"vLLM serves {served.directory} again (policy version {served.version or '?'})"
            )
            process = self._process

    def _end_group(self) -> None:
        process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 4)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def noted(directory: Path, version: str | None) -> Served:
    """``directory`` as it is on disk now; raises :class:`VllmError` when it holds no weights."""
    files = weight_files(directory)
    if not files:
        raise VllmError(f"{directory} holds no *.safetensors: give a model directory")
    return Served(directory, version, files)


def weight_files(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time (ns) of a checkpoint's files, by name."""
    stats = [(path.name, path.stat()) for path in sorted(directory.glob("*.safetensors"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def require_unchanged(served: Served) -> None:
    """Raise :class:`VllmError` unless the weights on disk are those that were served."""
    if weight_files(served.directory) != served.files:
        raise VllmError(
            f"the weights in {served.directory} are gone or changed since they were served: "
            "publish a version again, or start with the directory to serve"
        )


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_lives(leader: subprocess.Popen[bytes]) -> bool:
    leader.poll()
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _last_error(log: Path, start: int) -> str:
    """The line of vLLM's log after ``start`` that says best why it ended."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 200_000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    telling = [line for line in lines if "Error: " in line or "error: " in line]
    # What a worker raised comes first; the engine's and the server's own complaints follow from it.
    own = [line for line in telling if "EngineDead" not in line and "See root cause" not in line]
    line = (own or telling or [line for line in lines if line] or ["it said nothing"])[-1]
    return line.rpartition("] ")[2][:300]
