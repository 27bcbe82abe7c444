"""Attempts at sockets of the machine, and at the one that leads out of a container."""

import contextlib
import os
import socket
import stat

from .declaration import attempt, canaries_in, files_below

NETWORK = "users for sessions without walls have the machine's network"


def heard(family, address):
    """Connect, and return the secrets that the other side sends."""
    with socket.socket(family) as one:
        one.settimeout(0.5)
        one.connect(address)
        return canaries_in(one.recv(4096))


@attempt("Connect to a Unix socket in the agent's own folder.", "secret")
def connect_beside_the_agent(targets):
    return heard(socket.AF_UNIX, targets["sockets"][0])


@attempt("Connect to a Unix socket in another folder.", "secret")
def connect_elsewhere(targets):
    return heard(socket.AF_UNIX, targets["sockets"][1])


@attempt("Connect to every Unix socket below `/run` and `/tmp`.", "secret")
def connect_to_every_socket(targets):
    found = []
    for path in (path for folder in targets["socket_folders"] for path in files_below(folder)):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                found.append(heard(socket.AF_UNIX, path))
    return next(filter(None, found), None)


@attempt("Connect to an abstract Unix socket.", "secret", kept_open={"users/ordinary": NETWORK})
def connect_to_an_abstract_socket(targets):
    return heard(socket.AF_UNIX, "\0" + targets["abstract"])


@attempt(
    "Connect to a port of the machine's loopback.", "secret", kept_open={"users/ordinary": NETWORK}
)
def connect_to_a_port(targets):
    return heard(socket.AF_INET, ("127.0.0.1", targets["port"]))


@attempt(
    "Speak to Bridle on the container's socket as its first process, or as a result.",
    "run",
    only=("container",),
    why_only="no other sandbox has such a socket",
)
def speak_as_the_first_process(targets):
    result = b'report x {"exit_code": 0, "timed_out": false}\n'
    for greeting in (b"control\n{}\n", b"zygote\nx\n", result, b"report\n", b"\xff" * 4096):
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(2)
            one.connect(targets["relay"])
            one.sendall(greeting)
    return None
