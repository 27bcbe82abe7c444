"""The files that a session sees, built in a mount namespace of its own.

Inside, everything is read-only but the session's own folders. ``/tmp``, ``/dev`` and ``/run`` are
the session's own, so that no block device and no Unix socket of the machine is there. The files
that must stay private (keys, stores and their siblings, other sessions) are covered. Used by
``namespaced.py`` and ``zygote.py``, which run under other Pythons: standard library only, and no
import of ours.

:func:`build` takes its settings as a dictionary, since they come as JSON:

``own``
    Folders that can be written, at their own paths.
``tmp``
    The folder that is ``/tmp`` inside.
``shown``
    Paths below the machine's ``/tmp`` that stay visible, read-only.
``hidden``
    A folder is covered whole. A file is covered with its siblings, the files of its folder whose
    names begin with its name; it need not exist.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x8000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC = 4096, 16384
PRIVATE = MS_REC | 1 << 18
MOUNT_ATTR_RDONLY, AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = 1, -100, 0x8000, 442
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
LINUX_CAPABILITY_VERSION_3 = 0x20080522

KEPT_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 10, 13, 18, 29, 31}
"""Capabilities of a command that runs as root: those that Docker keeps, except MKNOD and SETPCAP.
Without the others it cannot undo these mounts, enter another namespace or look into a process."""

DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "nvidiactl", "nvidia-uvm", "kfd")
RUNNING = ("/run/current-system", "/run/opengl-driver", "/run/booted-system")
"""Folders of ``/run`` in which programs and libraries of some systems lie."""
PROC_OF_THE_MACHINE = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
MOST_ENTRIES = 1000
"""Maximum entries of a folder that is rebuilt around a hidden file of it."""

libc = ctypes.CDLL(None, use_errno=True)


def called(step: str, result: int) -> None:
    """Raise :class:`OSError` with the step as its second file name when ``result`` is not 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), None, None, step)


def build(settings: dict[str, Any]) -> None:
    """Build the view in this process's mount namespace, which must be a new one.

    Raise :class:`OSError` with the step that the machine refuses as its second file name.
    """
    held = Held()
    try:
        own = [(path, held.open(path)) for path in settings["own"]]
        tmp = held.open(settings["tmp"])
        shown = [(path, held.open(path)) for path in settings["shown"] if os.path.exists(path)]
        devices = [(name, held.open(f"/dev/{name}")) for name in device_names()]
        running = [(path, held.open(path)) for path in kept_of_run()]
        called("private mounts", libc.mount(b"none", b"/", None, PRIVATE, None))
        set_read_only("/", True, recursive=True)
        new_proc()
        for name in PROC_OF_THE_MACHINE:
            path = f"/proc/{name}"
            if os.path.exists(path):
                bind(path, path)
                set_read_only(path, True)
        build_dev(devices)
        build_run(running)
        bind(tmp, "/tmp")  # noqa: S108 - it becomes the session's own
        set_read_only("/tmp", False)  # noqa: S108
        for path, source in shown:
            put(source, path)
        for folder, names in covered(settings["hidden"]).items():
            cover(folder, names, held)
        for path, source in own:
            os.makedirs(path, exist_ok=True)
            bind(source, path)
            set_read_only(path, False)
        for folder in covered(settings["hidden"]):
            if os.path.ismount(folder):
                set_read_only(folder, True)
    finally:
        held.close()


class Held:
    """Paths that are mounted again after something has covered them."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def open(self, path: str) -> str:
        """Return a name under which the present content of ``path`` can be reached later."""
        try:
            self.numbers.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
        except OSError as error:
            error.filename2 = f"view of {path}"
            raise
        return f"/proc/self/fd/{self.numbers[-1]}"

    def close(self) -> None:
        for number in self.numbers:
            os.close(number)


def new_proc() -> None:
    """Mount ``/proc`` of this process's PID namespace."""
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    called("mount of /proc", libc.mount(b"proc", b"/proc", b"proc", flags, None))


def bind(source: str, target: str) -> None:
    flags = MS_BIND | MS_REC
    called("bind mount", libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None))


def put(source: str, path: str) -> None:
    """Show the file or folder at ``source``, read-only, at ``path``, which is made."""
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a"):
            pass
    bind(source, path)


def new_tmpfs(path: str, options: bytes = b"mode=755,size=16m") -> None:
    flags = MS_NOSUID | MS_NODEV
    called("tmpfs", libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options))


def set_read_only(path: str, wanted: bool, *, recursive: bool = False) -> None:
    """Make the mount at ``path`` read-only or writable.

    With ``recursive``, the mounts below it become so too.
    """
    bits = (MOUNT_ATTR_RDONLY, 0) if wanted else (0, MOUNT_ATTR_RDONLY)
    attributes = (ctypes.c_uint64 * 4)(*bits, 0, 0)
    result = libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_long(AT_FDCWD),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_long(AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_long(ctypes.sizeof(attributes)),
    )
    if result != 0 and ctypes.get_errno() == errno.ENOSYS:
        remount(path, wanted, recursive)
        return
    called("read-only mounts", result)


def remount(path: str, read_only: bool, recursive: bool) -> None:
    """Do the same as :func:`set_read_only`, for Linux before 5.12."""
    flags_of = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}
    flags_of |= {"noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.split()[4:6] for line in file]
    wanted = os.path.realpath(path)
    for escaped, options in mounts:
        point = escaped.encode("latin-1", "surrogateescape").decode("unicode_escape")
        if point != wanted and not (recursive and point.startswith(wanted.rstrip("/") + "/")):
            continue
        flags = MS_BIND | MS_REMOUNT | (MS_RDONLY if read_only else 0)
        for option in options.split(","):
            flags |= flags_of.get(option, 0)
        result = libc.mount(b"none", os.fsencode(point), None, flags, None)
        if result != 0 and ctypes.get_errno() not in (errno.EACCES, errno.ENOENT, errno.EINVAL):
            called("read-only mounts", result)


def device_names() -> list[str]:
    numbered = [f"nvidia{number}" for number in range(16)]
    names = (*DEVICES, *numbered, "dri")
    return [name for name in names if os.path.exists(f"/dev/{name}")]


def build_dev(devices: list[tuple[str, str]]) -> None:
    """Build a ``/dev`` without the machine's disks.

    It has the usual devices, those of the GPUs, and terminals and shared memory of its own.
    """
    new_tmpfs("/dev", b"mode=755,size=64k")
    for name, source in devices:
        put(source, f"/dev/{name}")
    for name, target in (("fd", "/proc/self/fd"), ("ptmx", "pts/ptmx")):
        os.symlink(target, f"/dev/{name}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.mkdir("/dev/pts")
    options = b"newinstance,ptmxmode=0666,mode=620"
    flags = MS_NOSUID | MS_NOEXEC
    called("terminals", libc.mount(b"devpts", b"/dev/pts", b"devpts", flags, options))
    os.mkdir("/dev/shm")  # noqa: S108 - the session's own
    new_tmpfs("/dev/shm", b"mode=1777")  # noqa: S108
    set_read_only("/dev", True)


def kept_of_run() -> list[str]:
    resolver = os.path.realpath("/etc/resolv.conf")
    kept = [resolver] if resolver.startswith("/run/") else []
    return [path for path in (*RUNNING, *kept) if os.path.exists(path)]


def build_run(kept: list[tuple[str, str]]) -> None:
    """Build ``/run`` empty but for ``kept``, because its sockets lead to programs outside."""
    if not os.path.isdir("/run"):
        return
    new_tmpfs("/run")
    for path, source in kept:
        put(source, path)


def covered(hidden: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the folders to cover, outer ones first.

    Each comes with the beginnings of the names that it is covered for. A folder that is covered
    whole has none.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path in hidden:
        real = os.path.realpath(path)
        if os.path.isdir(real):
            found[real] = ()
            continue
        folder, name = os.path.split(real)
        if name and os.path.isdir(folder) and found.get(folder, (name,)):
            found[folder] = (*found.get(folder, ()), name)
    return dict(sorted(found.items()))


def cover(folder: str, names: tuple[str, ...], held: Held) -> None:
    """Cover ``folder`` by an empty one, and put back everything in it but ``names``."""
    if folder == "/":
        mask(folder, names)
        return
    if not os.path.isdir(folder):
        return  # A folder above it is covered.
    kept: list[os.DirEntry[str]] = []
    if names:
        with os.scandir(folder) as entries:
            kept = [entry for entry in entries if not entry.name.startswith(names)]
        if len(kept) > MOST_ENTRIES:
            mask(folder, names)
            return
    below = held.open(folder)
    new_tmpfs(folder, b"mode=755,size=4m")
    for entry in kept:
        target = os.path.join(folder, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(f"{below}/{entry.name}"), target)
        elif entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
            put(f"{below}/{entry.name}", target)


def mask(folder: str, names: tuple[str, ...]) -> None:
    """Make the files of ``folder`` whose names begin with ``names`` read as empty."""
    with os.scandir(folder) as entries:
        hidden = [entry.path for entry in entries if entry.name.startswith(names)]
    for path in hidden:
        if os.path.isfile(path):
            bind("/dev/null", path)


def limit_capabilities() -> None:
    """Leave root :data:`KEPT_CAPABILITIES`, and another user none, for good."""
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    values = (ctypes.c_uint32 * 6)()
    called("capabilities", libc.capget(header, values))
    kept = KEPT_CAPABILITIES if os.getuid() == 0 else set()
    for capability in range(64):
        if capability not in kept:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # Effective, permitted and inheritable, for the first 32 capabilities and for the others.
    bits = values[1] & sum(1 << capability for capability in kept)
    values = (ctypes.c_uint32 * 6)(bits, bits, 0, 0, 0, 0)
    called("capabilities", libc.capset(header, values))
