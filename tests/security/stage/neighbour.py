"""A process of the operator's: it serves sockets with secrets, and has one in an open file.

``neighbour.py FOLDER NAME`` prints its TCP port, and runs until it is killed.
"""

import os
import secrets
import selectors
import socket
import sys


def main() -> None:
    folder, name = sys.argv[1:]
    opened = os.memfd_create("secret")
    os.write(opened, secret())
    selector = selectors.DefaultSelector()
    port = socket.create_server(("127.0.0.1", 0))
    servers = [port]
    for path in (f"{folder}/agent/machine.sock", f"{folder}/elsewhere.sock", f"\0bridle-{name}"):
        if os.path.exists(path):
            os.unlink(path)
        one = socket.socket(socket.AF_UNIX)
        one.bind(path)
        one.listen()
        servers.append(one)
    for one in servers:
        selector.register(one, selectors.EVENT_READ)
    print(port.getsockname()[1], flush=True)
    while True:
        for key, _ in selector.select():
            connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
            with connection:
                connection.sendall(secret())


def secret() -> bytes:
    return f"bridle-canary-{secrets.token_hex(8)}\n".encode()


if __name__ == "__main__":
    main()
