"""The warm process: imports libraries once, then forks a child for every script it is asked to run.

Runs as a script under the agents' own Python (``python zygote.py FD MODULE…``), so it uses the
standard library only and imports nothing of ours. It speaks JSON lines over the socket ``FD``:

    ->  {"op": "run", "id": 7, "argv": [script, …], "cwd": …, "env": {…}, "stdout": …, "stderr": …}
    ->  {"op": "signal", "id": 7, "number": 15}
    <-  {"ready": true, "threads": 1, "failed": ["module: why", …], "seconds": 1.9}
    <-  {"id": 7, "pid": 4711}
    <-  {"id": 7, "code": 0}          -n when signal n ended the child
    <-  {"learned": ["module", …]}    imported after the first good run, see ``Learner``

What makes the fork safe: this process has one thread, creates no client, opens no connection and
runs no event loop. A child gets its own process group, environment, directory, output files and
random state, and runs the script with ``runpy`` as ``__main__``; the script cannot tell, but for
hash randomisation, which all children share. When the socket closes, every child is killed.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The caller's modules are not ours to offer: drop this file's own directory from the path.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    started = time.monotonic()
    failed = preload(sys.argv[2:])
    Zygote(control).serve(
        {
            "ready": True,
            "threads": thread_count(),
            "failed": failed,
            "seconds": time.monotonic() - started,
        }
    )


def preload(modules):
    """Imports what can be imported; returns ``module: why`` for the others."""
    failed = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - reported to the runtime, which names it
            failed.append(f"{module}: {error!r}")
    gc.collect()
    # Children share these objects' pages until someone writes; the collector would.
    gc.freeze()
    return failed


def thread_count():
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


class Zygote:
    """The loop: requests from the socket, ends of children from SIGCHLD."""

    def __init__(self, control):
        self.control = control
        self.children = {}  # pid -> id
        self.pids = {}  # id -> pid
        self.learner = Learner()
        self.buffer = b""
        self.wakeup_read, self.wakeup_write = os.pipe()
        os.set_blocking(self.wakeup_read, False)
        os.set_blocking(self.wakeup_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)

    def serve(self, greeting):
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
                    self.kill_all()
                    return
            self.reap()

    def receive(self):
        """Handles what has arrived; False when the other side is gone."""
        try:
            data = self.control.recv(1 << 20)
        except ConnectionError:
            data = b""
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

    def run(self, request):
        report = self.learner.report_for_next()
        pid = os.fork()
        if pid == 0:
            self.control.close()
            signal.set_wakeup_fd(-1)
            os.close(self.wakeup_read)
            os.close(self.wakeup_write)
            become(request, report)
        if report is not None:
            self.learner.teacher = pid
        self.children[pid] = request["id"]
        self.pids[request["id"]] = pid
        self.send({"id": request["id"], "pid": pid})

    def signal(self, identifier, number):
        # A child that has not been reaped still owns its number, so this cannot hit a stranger.
        pid = self.pids.get(identifier)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def reap(self):
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid not in self.children:
                continue
            # Its group may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            identifier = self.children.pop(pid)
            del self.pids[identifier]
            code = os.waitstatus_to_exitcode(status)
            self.send({"id": identifier, "code": code})
            learned = self.learner.finished(pid, code)
            if learned is not None:
                self.send({"learned": learned})

    def kill_all(self):
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def send(self, message):
        self.control.sendall(json.dumps(message).encode() + b"\n")


class Learner:
    """After the first run that ended well, imports the library modules which that run imported.

    Libraries import parts of themselves late, on first use; a list of modules to preload cannot
    know them. The script's own modules are left alone: only what lies in the standard library or
    in site-packages is learned, and only when a trial shows that it starts no thread.
    """

    def __init__(self):
        self.teacher = None
        self.report = None
        self.done = False

    def report_for_next(self):
        """Where the next child is to list its modules; ``None`` when it need not."""
        if self.done or self.report is not None:
            return None
        self.report = tempfile.TemporaryFile()
        return self.report

    def finished(self, pid, code):
        """The modules imported now that ``pid`` has ended, or ``None`` when it taught nothing."""
        if pid != self.teacher:
            return None
        self.report.seek(0)
        names = self.report.read().decode().split("\n")
        self.report.close()
        self.teacher = self.report = None
        if code != 0:
            return None
        self.done = True
        new = [name for name in names if name and name not in sys.modules and is_library(name)]
        if starts_threads(new):
            return []
        failed = {line.partition(":")[0] for line in preload(new)}
        return [name for name in new if name not in failed]


def starts_threads(modules):
    """Whether importing ``modules`` leaves a thread behind; tried in a child of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            preload(modules)
            os._exit(thread_count() > 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] != 0


def is_library(name):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None or spec.origin is None:
        return False
    roots = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return spec.origin in ("built-in", "frozen") or any(
        spec.origin.startswith(root + os.sep) for root in roots
    )


def become(request, report):
    """In the child: turns into the process that was asked for, runs the script, exits."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    reseed()
    script = request["argv"][0]
    sys.argv[:] = request["argv"]
    extra = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [
        os.path.dirname(os.path.realpath(script)),
        *(entry for entry in extra if entry not in sys.path),
    ]
    imported = set(sys.modules)
    code = run_script(script)
    if report is not None:
        report.write("\n".join(sorted(set(sys.modules) - imported)).encode())
        report.flush()
    leave(code)


def reseed():
    """The child's own randomness; the standard library's reseeds itself after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def run_script(script):
    """Runs ``script`` as ``python script`` would; returns its exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next
        sys.excepthook(type(error), error, frames or error.__traceback__)
        return 1
    return 0


def leave(code):
    """The end of an interpreter, without tearing down every module of this large process."""
    try:
        threading._shutdown()  # waits for the script's own non-daemon threads, as at any exit
        atexit._run_exitfuncs()
        gc.collect()  # closes, and so flushes, files that the script left open
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
