"""The warm process: imports libraries once, then forks a child for every script it is asked to run.

Runs as a script under the agents' own Python (``python zygote.py FD FRESH MODULE…``; ``FRESH`` are
the packages, with commas, that no one else may import), so it uses the standard library only and
imports nothing of ours. It speaks JSON lines over the socket ``FD``::

    ->  {"op": "run", "id": 7, "argv": [script, …], "cwd": …, "env": {…}, "stdout": …, "stderr": …}
        and "uid", the user to become; "walls", the walls around it (``walls.py``), as
        {"command": ["bwrap", …], "door": …, "port": 8484}
    ->  {"op": "signal", "id": 7, "number": 15}
    <-  {"threads": 1, "failed": ["module: why", …]}     once, ready
    <-  {"id": 7, "pid": 4711}
    <-  {"id": 7, "code": 0}          -n when signal n ended the child

A child with ``walls`` starts ``command``, whose first process writes an empty line to its standard
error and then holds the walls, enters its namespaces, and forks the script there: neither other
sessions nor this process are there for it. All that is in the walls has ended before the child
ends. The child reports the start to the Unix socket ``door``, with a socket that listens on
``port`` inside, or the reason why there are no walls.

What makes the fork safe: this process has one thread, creates no client, opens no connection and
runs no event loop. A child gets its own process group, environment, directory, output files and
random state, and runs the script as ``__main__``. The only differences
to a run of its own: all children share hash randomisation, and libraries that read the environment
while they are imported have read the warm process's. When the socket closes, every child is killed.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import selectors
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import types
from typing import IO, Any, NoReturn

TRIAL_S = 30
"""Maximum seconds for trying to import the modules that a session imported."""
CLONE_NEWUSER = 0x10000000
NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
"""The namespaces of walls: mounts, host name, IPC, process numbers and network."""
KILL = signal.SIGUSR2
"""The signal on which a child with walls ends all that is in them; only then it ends itself."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # This file's directory is not the scripts' to import from.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    failed = preload(sys.argv[3:])
    Zygote(control, set(sys.argv[2].split(","))).serve(
        {"threads": thread_count(), "failed": failed}
    )


def preload(modules: list[str]) -> list[str]:
    """Import the modules that can be imported; return ``module: why`` for the others."""
    failed = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - any code can raise anything; it is reported
            failed.append(f"{module}: {error!r}")
    gc.collect()
    # Children share these objects' pages until someone writes to them; the collector would.
    gc.freeze()
    return failed


def thread_count() -> int:
    """Return the number of threads of this process, native ones included where /proc lists them."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


class Zygote:
    """The loop over requests from the socket and ends of children from SIGCHLD."""

    def __init__(self, control: socket.socket, fresh: set[str]) -> None:
        self.control = control
        self.ids: dict[int, int] = {}
        """Ids by process number, for children that have not been reaped."""
        self.pids: dict[int, int] = {}
        self.walled: set[int] = set()
        """Ids of the children with walls."""
        self.late_imports = LateImports(fresh)
        self.buffer = b""
        self.wakeup_read, self.wakeup_write = os.pipe()
        os.set_blocking(self.wakeup_read, False)
        os.set_blocking(self.wakeup_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)

    def serve(self, greeting: dict[str, Any]) -> None:
        """Serve until the other side is gone."""
        self.send(greeting)
        selector = selectors.PollSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(self.wakeup_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == self.wakeup_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wakeup_read, 4096)
                elif not self.receive():
                    for identifier in self.pids:
                        self.signal(identifier, signal.SIGKILL)
                    return
            self.reap()

    def receive(self) -> bool:
        """Handle the requests that have arrived; return False when the other side is gone."""
        try:
            data = self.control.recv(1 << 20)
        except ConnectionError:
            return False
        if not data:
            return False
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "run":
                self.run(request)
            else:
                self.signal(request["id"], request["number"])
        return True

    def run(self, request: dict[str, Any]) -> None:
        report = self.late_imports.report_for_next()
        pid = os.fork()
        if pid == 0:
            self.control.close()
            signal.set_wakeup_fd(-1)
            os.close(self.wakeup_read)
            os.close(self.wakeup_write)
            if "walls" in request:
                enter(request)
            become(request, report)
        if report is not None:
            self.late_imports.teacher = pid
        self.ids[pid] = request["id"]
        self.pids[request["id"]] = pid
        if "walls" in request:
            self.walled.add(request["id"])
        self.send({"id": request["id"], "pid": pid})

    def signal(self, identifier: int, number: int) -> None:
        # A child that has not been reaped still owns its number, so this cannot hit a stranger.
        pid = self.pids.get(identifier)
        if pid is None:
            return
        if number == signal.SIGKILL and identifier in self.walled:
            number = KILL
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            # Just forked: it has not made its group yet.
            os.kill(pid, number)

    def reap(self) -> None:
        while self.ids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            # What it started may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            identifier = self.ids.pop(pid)
            del self.pids[identifier]
            self.walled.discard(identifier)
            code = os.waitstatus_to_exitcode(status)
            self.send({"id": identifier, "code": code})
            self.late_imports.finished(pid, code)

    def send(self, message: dict[str, Any]) -> None:
        # The other side may be gone already; the next read of the socket finds out.
        with contextlib.suppress(ConnectionError):
            self.control.sendall(json.dumps(message).encode() + b"\n")


class LateImports:
    """Imports the library modules that the first successful run imported, once that run has ended.

    Libraries import parts of themselves late, on first use; a list of modules to preload cannot
    know them. The script's own modules are left alone: only modules in the standard library or in
    site-packages are learned, without ``fresh``, and only when a trial shows that they start no
    thread.
    """

    def __init__(self, fresh: set[str]) -> None:
        self.fresh = fresh
        self.teacher: int | None = None
        self.report: IO[bytes] | None = None
        self.done = False

    def report_for_next(self) -> IO[bytes] | None:
        """Return the file in which the next child is to list its modules.

        Return ``None`` if the child need not.
        """
        if self.done or self.report is not None:
            return None
        self.report = tempfile.TemporaryFile()  # noqa: SIM115 - closed in finished()
        return self.report

    def finished(self, pid: int, code: int) -> None:
        """Learn the modules of child ``pid`` if it is the one that lists them."""
        if pid != self.teacher or self.report is None:
            return
        with self.report as report:
            report.seek(0)
            names = report.read().decode().split("\n")
        self.teacher = self.report = None
        if code != 0:
            return
        self.done = True
        new = [
            name
            for name in names
            if name and name.partition(".")[0] not in self.fresh and is_library(name)
        ]
        if not starts_threads(new):
            preload(new)


def is_library(name: str) -> bool:
    """Return whether module ``name`` lies in the standard library or in site-packages."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None or spec.origin is None:
        return False
    roots = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(spec.origin.startswith(root + os.sep) for root in roots)


def starts_threads(modules: list[str]) -> bool:
    """Return whether importing ``modules`` leaves a thread behind, tried in a child process."""
    pid = os.fork()
    if pid == 0:
        try:
            # The names come from a session: none of them may hold up the others.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TRIAL_S)
            preload(modules)
            os._exit(thread_count() > 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] != 0


def enter(request: dict[str, Any]) -> None:
    """Build walls, enter them, and return in a child in which the script is to run.

    This process passes signals on to it, and ends with it. :data:`KILL` ends all that is inside.
    """
    os.setsid()
    open_output(request)
    walls = request["walls"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.connect(walls["door"])
        try:
            bubblewrap, first, kept = hold(walls["command"])
            listening = move_into(first, walls["port"])
        except OSError as error:
            door.send(str(error).encode()[-1000:])
            os._exit(127)
        socket.send_fds(door, [b"\n"], [one.fileno() for one in listening])
        for one in listening:
            one.close()
    child = os.fork()
    if child == 0:
        os.close(first)
        os.close(kept)
        return
    signal.signal(KILL, lambda *_: end(first))
    for number in FORWARDED:
        signal.signal(number, lambda number, _: pass_on(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end(first)
    os.waitpid(bubblewrap, 0)
    os._exit(code if code >= 0 else 128 - code)


def end(first: int) -> None:
    """End all that is inside, if anything still is."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(first, signal.SIGKILL)


def hold(command: list[str]) -> tuple[int, int, int]:
    """Start walls that stand until their standard input ends.

    Return the process number of bubblewrap, a descriptor of the first process inside, and the
    descriptor that keeps the input open. Raise :class:`OSError` if there are no walls.
    """
    held, kept, status, stated, said, saying = *os.pipe(), *os.pipe(), *os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, one, to) for to, one in enumerate((held, stated, saying))]
    bubblewrap = os.posix_spawnp(command[0], command, {}, file_actions=actions, setpgroup=0)
    for one in (held, stated, saying):
        os.close(one)
    problem = os.read(said, 4096)
    if problem != b"\n":
        while more := os.read(said, 4096):
            problem += more
        raise OSError(problem.decode("utf-8", "replace").strip())
    first = json.loads(os.read(status, 4096).splitlines()[0])["child-pid"]
    for one in (status, said):
        os.close(one)
    return bubblewrap, os.pidfd_open(first), kept


def move_into(first: int, port: int) -> list[socket.socket]:
    """Enter the namespaces of a process; return the sockets that listen on ``port`` in them.

    Port 0 stands for no socket. Later children are in the namespace of processes, too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(first, NAMESPACES | (0 if os.getuid() == 0 else CLONE_NEWUSER)) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the walls")
    return [socket.create_server(("127.0.0.1", port), backlog=128)] if port else []


def pass_on(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except ProcessLookupError:
        # Just forked: it has not made its group yet.
        os.kill(child, number)


def open_output(request: dict[str, Any]) -> None:
    """Open the three standard streams from the files that are asked for."""
    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], writing),
        (2, request["stderr"], writing),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)


def become(request: dict[str, Any], report: IO[bytes] | None) -> NoReturn:
    """Turn the child into the process that was asked for, run the script and exit."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "walls" not in request:
        open_output(request)
    if "uid" in request:
        os.setgroups([])
        os.setgid(request["uid"])
        os.setuid(request["uid"])
    if "uid" in request or "walls" in request:
        drop_capabilities()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    reseed()
    script: str = request["argv"][0]
    sys.argv[:] = request["argv"]
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [
        os.path.dirname(os.path.realpath(script)),
        *(entry for entry in named if entry not in sys.path),
    ]
    imported_before = set(sys.modules)
    code = run_script(script)
    if report is not None:
        report.write("\n".join(sorted(set(sys.modules) - imported_before)).encode())
        report.flush()
    leave(code)


def drop_capabilities() -> None:
    """Drop all capabilities, for good.

    The kernel takes them from root that becomes another user, but not from another user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    libc.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "cannot drop capabilities")


def reseed() -> None:
    """Give the child randomness of its own. The standard library's reseeds itself after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def run_script(script: str) -> int:
    """Run ``script`` as ``python script`` would; return its exit code."""
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=script, __cached__=None, __builtins__=builtins)
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    try:
        with io.open_code(script) as source:
            code = compile(source.read(), script, "exec", dont_inherit=True)
        exec(code, main_module.__dict__)  # noqa: S102 - this is what we are for
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does, last
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as an interpreter does, without tearing down every module of this large process."""
    try:
        # Private names, but there are no others for what every exit does: wait for the script's
        # threads, run its exit functions.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # Closes, and so flushes, files that the script left open.
        sys.modules["__main__"].__dict__.clear()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
