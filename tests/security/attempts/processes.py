"""Attempts through ``/proc``: roots, open files, memory, namespaces, settings, descriptors."""

import ctypes
import os
from pathlib import Path

from .declaration import attempt, canaries_in, secret_of

LIBC = ctypes.CDLL(None, use_errno=True)


def others(targets):
    """Return the processes that are visible, and a neighbour's by its number on the machine."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [targets["neighbour"]["process"], *(one for one in numbers if one != os.getpid())]


def first(found, numbers):
    """Return the first secret that ``found`` returns for a process."""
    for number in numbers:
        try:
            if got := found(number):
                return got
        except (OSError, ValueError):
            continue
    return None


def in_a_child(found):
    """Return what ``found`` returns in a process of its own, with which its traces end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, (found() or "").encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    got = os.read(reading, 4096).decode()
    os.close(reading)
    return got or None


@attempt("Read private files below the root and the folder of other processes.", "secret")
def read_through_roots(targets):
    links = (f"{number}/{link}" for number in others(targets) for link in ("root", "cwd"))
    return first(lambda link: secret_of(f"/proc/{link}{targets['key']}"), links)


@attempt("Read the open files of other processes.", "secret")
def read_open_files(targets):
    def found(number):
        paths = Path(f"/proc/{number}/fd").glob("*")
        return first(lambda path: path.is_file() and secret_of(path), paths)

    return first(found, others(targets))


@attempt("Trace other processes, and read their memory.", "secret")
def read_memory(targets):
    def found(number):
        LIBC.ptrace(0x4206, number, 0, 0)  # PTRACE_SEIZE
        maps = Path(f"/proc/{number}/maps").read_text().splitlines()
        areas = (line.split()[0].split("-") for line in maps if line.endswith("[stack]"))
        with open(f"/proc/{number}/mem", "rb") as memory:
            for begin, end in areas:
                memory.seek(int(begin, 16))
                return canaries_in(memory.read(int(end, 16) - int(begin, 16)))
        return None

    # A process stays stopped at a signal while its tracer lives, and the first one reaps orphans.
    numbers = others(targets)
    return in_a_child(lambda: first(found, numbers))


@attempt("Enter the namespaces of other processes, and read private files.", "secret")
def enter_namespaces(targets):
    def enter(number):
        with open(f"/proc/{number}/ns/mnt") as file:
            LIBC.setns(file.fileno(), 0)
        return secret_of(targets["key"])

    return in_a_child(lambda: first(enter, others(targets)))


@attempt("Write the kernel's settings (`core_pattern`).", "changed")
def write_the_kernels_settings(targets):
    Path(targets["kernel"]).write_text("|/bin/evil")
    return "written"


@attempt("Write to every descriptor that it inherited, as if it reported its result.", "run")
def write_to_inherited_descriptors(targets):
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_blocking(int(name), False)
                os.write(int(name), b'{"exit_code": 0, "evil": true}\n')
            except OSError:
                continue
    return None


@attempt("Read every descriptor that it inherited.", "secret")
def read_inherited_descriptors(targets):
    def found(name):
        os.set_blocking(int(name), False)
        return canaries_in(os.read(int(name), 1 << 16))

    return first(found, [name for name in os.listdir("/proc/self/fd") if int(name) > 2])
