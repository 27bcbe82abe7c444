"""vLLM as a supervised child process.

:class:`VllmServer` starts vLLM in a process group of its own, waits until it serves, starts it
again when it dies, and ends the whole group when it is stopped. A restart begins with the weights
that were served last: the worker records their directory and policy version at each reload
(``inside/bridle_worker.py``). If they are no longer on disk, or not the files that were loaded,
vLLM stays down: serving other weights under the same version would falsify every record after it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bridle.engine.contract.client import EngineError
from bridle.engine.vllm.control import VllmControl
from bridle.engine.vllm.flags import VllmOptions, command, environment
from bridle.engine.vllm.installation import Installation, VllmError, find_installation

POLL_SECONDS: Final = 0.2
_ERROR_LINE: Final = re.compile(r"(^|[\] .])\w*(Error|Exception): |: error: ")
_VALIDATION: Final = re.compile(r"ValidationError: \d+ validation errors? for \w+$")
_PARSER_ERROR: Final = re.compile(r"pars(er|ing)", re.IGNORECASE)
_PARSER_REMEDY: Final = (
    ": choose other parsers with --set tool_parser=NAME and reasoning_parser=NAME, or none"
)
STOP_SECONDS: Final = 10.0
"""Seconds between asking vLLM's processes to end and killing them."""


@dataclass(frozen=True, slots=True)
class Served:
    """The weights that a vLLM serves."""

    directory: Path
    version: str | None
    """The policy version; ``None`` until it was set."""
    files: tuple[tuple[str, int, int], ...]
    """Name, size and modification time (ns) of each weight file when it was noted."""


class VllmServer:
    """A vLLM on this machine; a context manager that starts and stops it.

    ``run_dir`` gets ``vllm.log`` and ``served.json``. When vLLM dies it is started again, as often
    as ``options`` permit. ``on_event`` is called with each death, restart and refusal, from the
    watching thread. With ``resume``, it begins with the weights that the previous vLLM served out
    of ``run_dir``, if there was one, as a restart does. vLLM requires ``api_key`` on every route.
    """

    def __init__(
        self,
        model_dir: str | Path,
        run_dir: str | Path,
        *,
        options: VllmOptions | None = None,
        python: str | Path | None = None,
        resume: bool = False,
        on_event: Callable[[str], None] = lambda _event: None,
        api_key: str | None = None,
    ) -> None:
        self.options = options or VllmOptions()
        self.installation: Installation = find_installation(python)
        self.port = self.options.port or _free_port(self.options.host)
        self.log = Path(run_dir) / "vllm.log"
        self.started_in: float | None = None
        """Seconds from the last start until it served."""
        version = self.options.version
        self._first = noted(Path(model_dir).absolute(), None if version is None else str(version))
        self._served_file = Path(run_dir).absolute() / "served.json"
        self._resume = resume
        self._on_event = on_event
        self._api_key = api_key
        self._key_file = None if api_key is None else _KeyFile(api_key)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = 0
        """The offset in the log at which the output of the running vLLM begins."""
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        self._settled = threading.Event()
        """An event that is set while vLLM serves, and when it will not serve any more."""
        self._refusal: VllmError | None = None

    @property
    def base_url(self) -> str:
        host = "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the API server, which leads the process group."""
        return None if self._process is None else self._process.pid

    @property
    def refusal(self) -> VllmError | None:
        """The reason why vLLM will not be started again, or ``None`` while it serves or starts."""
        return self._refusal

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start vLLM and return when it serves. Raise :class:`VllmError` if it does not."""
        _require_free(self.options.host, self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if not self._resume:
            self._served_file.unlink(missing_ok=True)
        self._stopping.clear()
        self._settled.clear()
        self._refusal = None
        # vLLM ends with the thread that launched it, so the launching is the watcher's.
        self._watcher = threading.Thread(target=self._watch, name="vllm watcher", daemon=True)
        self._watcher.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End vLLM and all its processes. Return when they are gone."""
        self._stopping.set()
        self._end_group()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Return when vLLM serves, also again after a death.

        Raise :class:`VllmError` if it will not serve, or not within ``timeout`` seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # Python's handler of a signal that comes just before a wait runs only after it.
        while not self._settled.wait(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise VllmError(f"vLLM did not serve within {timeout:.0f} s; see {self.log}")
        if self._refusal is not None:
            raise self._refusal

    def served(self) -> Served:
        """Return the weights that are served now, or will be after a restart."""
        try:
            note = json.loads(self._served_file.read_text())
        except FileNotFoundError:
            return self._first
        files = tuple((name, size, changed) for name, size, changed in note["files"])
        return Served(Path(note["directory"]), note["version"], files)

    def _watch(self) -> None:
        """Keep vLLM running until it is stopped, or may not be started again."""
        left = self.options.restarts
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                process, served = self._launch()
            except (VllmError, EngineError, OSError, ValueError) as error:
                # The last two: a file that cannot be read or written, or does not hold what it
                # should. Whoever waits for vLLM must hear of it.
                self._refuse(f"vLLM was not started: {error}")
                return
            if left < self.options.restarts:
                version = "unknown" if served.version is None else served.version
                self._on_event(f"vLLM serves {served.directory} again, policy version {version}")
            status = process.wait()
            self._settled.clear()
            self._end_group()
            if self._stopping.is_set():
                return
            self._on_event(f"vLLM ended: {self._cause(status)}")
            if time.monotonic() - began > 3600:
                left = self.options.restarts
            if left == 0:
                self._refuse(f"vLLM keeps ending; see {self.log}")
                return
            left -= 1

    def _refuse(self, message: str) -> None:
        self._refusal = VllmError(message)
        if not self._stopping.is_set():
            self._on_event(message)
        self._settled.set()

    def _launch(self) -> tuple[subprocess.Popen[bytes], Served]:
        served = self.served()
        require_unchanged(served)
        started = time.monotonic()
        arguments = command(
            self.installation,
            served.directory,
            self.options,
            self.port,
            guarded=self._api_key is not None,
        )
        variables = environment(
            self.installation,
            self.options,
            self._served_file,
            os.environ,
            None if self._key_file is None else self._key_file.path,
        )
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(arguments)}\n".encode())
            log.flush()
            self._output = log.tell()
            process = self._process = subprocess.Popen(
                arguments,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await_health(process)
            self._first_token(process)
            self._stamp(served)
        except BaseException:
            self._end_group()
            raise
        self.started_in = time.monotonic() - started
        self._settled.set()
        return process, served

    def _await_health(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.options.ready_timeout_s
        with self._control(timeout=5.0) as control:
            while not control.healthy():
                if self._stopping.is_set():
                    raise VllmError("it was stopped while it started")
                status = process.poll()
                if status is not None:
                    raise VllmError(f"{self._cause(status)} (see {self.log})")
                if time.monotonic() > deadline:
                    raise VllmError(
                        f"it did not serve within {self.options.ready_timeout_s:.0f} s; see "
                        f"{self.log}, or allow more time"
                    )
                time.sleep(POLL_SECONDS)

    def _first_token(self, process: subprocess.Popen[bytes]) -> None:
        """Compute one token, since some of what vLLM cannot compute shows only then."""
        try:
            with self._control() as control:
                control.score([0, 0])
        except EngineError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise VllmError(f"{self._cause(process.wait(5))} (see {self.log})") from error
            raise

    def _stamp(self, served: Served) -> None:
        """Set the policy version of the weights, which a fresh vLLM does not know."""
        if served.version is not None:
            with self._control() as control:
                control.stamp(int(served.version))

    def _control(self, timeout: float = 120.0) -> VllmControl:
        return VllmControl(self.base_url, timeout=timeout, api_key=self._api_key)

    def _cause(self, status: int) -> str:
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        error = _last_error(self.log, self._output)
        remedy = _PARSER_REMEDY if _PARSER_ERROR.search(error) else ""
        return f"{error} (status {status}){remedy}"

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


class _KeyFile:
    """A file in memory with a key, which processes of this user read while this one has it open.

    No descriptor is inherited: vLLM's server may be a process that vLLM spawns.
    """

    def __init__(self, key: str) -> None:
        self._file = open(os.memfd_create("key"), "wb", buffering=0)  # noqa: SIM115 - kept open
        self._file.write(key.encode())
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"


def noted(directory: Path, version: str | None) -> Served:
    """Return ``directory`` as it is on disk now.

    Raise :class:`VllmError` if it holds no weights.
    """
    files = weight_files(directory)
    if not files:
        raise VllmError(f"{directory} holds no *.safetensors: give a model directory")
    return Served(directory, version, files)


def weight_files(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and modification time (ns) of a checkpoint's files, by name."""
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
    with _socket(host) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _require_free(host: str, port: int) -> None:
    """Raise :class:`VllmError` if something listens there.

    Its answers would be taken for those of the vLLM to come, and it would be sent that one's policy
    version.
    """
    with _socket(host) as listener:
        # As vLLM does; else what was there a moment ago would still count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            # Of any other reason vLLM speaks itself.
            if error.errno == errno.EADDRINUSE:
                raise VllmError(
                    f"vLLM was not started: port {port} of {host} is taken: choose another, or end "
                    "what listens there"
                ) from error


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


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
    """Return the line of vLLM's log after ``start`` that best shows why it ended."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 200_000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    # Each process complains in turn, from the one that failed up to the server; the first "Error"
    # line is the cause.
    at = next((at for at, line in enumerate(lines) if _ERROR_LINE.search(line)), None)
    if at is None:
        line = next(filter(None, reversed(lines)), "it said nothing")
    elif _VALIDATION.search(lines[at]):
        # Below stand the field, if it is only one, and the cause, before all that was given.
        line = " ".join(lines[at + 1 : at + 3]).partition(" [type=")[0]
    else:
        line = lines[at]
    return line.rpartition("] ")[2][:300]
