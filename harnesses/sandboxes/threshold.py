"""The first program inside a session's walls; its text is run by ``python -I -S -c``.

``SOCKET ENVIRONMENT PORT COMMAND …``. It listens on the port of the session's own loopback, sends
the listening socket to Bridle through the inherited ``SOCKET``, which leads out, and becomes the
command, with the environment in the inherited file ``ENVIRONMENT``: no other process has it. With
port 0 it sends no socket, because the network is the machine's. If the command cannot be started,
the error's number is sent, too. The program uses the standard library only.
"""

import _socket
import array
import os
import sys


def main() -> None:
    number, file, port = map(int, sys.argv[1:4])
    command = sys.argv[4:]
    os.setsid()
    with open(file, "rb") as written:
        entries = [entry.split(b"=", 1) for entry in written.read().split(b"\0") if entry]
    os.set_inheritable(number, False)
    outside = _socket.socket(fileno=number)
    sent = []
    if port:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        listening = array.array("i", [listener.fileno()])
        sent = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listening.tobytes())]
    outside.sendmsg([b"\n"], sent)
    try:
        os.execvpe(command[0], command, dict(entries))  # noqa: S606 - what the program is for
    except (OSError, ValueError) as error:
        outside.send(str(getattr(error, "errno", None) or 0).encode())
    os._exit(127)


if __name__ == "__main__":
    main()
