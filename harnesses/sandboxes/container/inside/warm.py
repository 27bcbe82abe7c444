"""Starts the warm process (``zygote.py``) of a container, on a connection to the relay outside.

``warm.py ZYGOTE SOCKET FRESH MODULE…``.
"""

from __future__ import annotations

import runpy
import socket
import sys

zygote, path, *rest = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
connection.sendall(b"zygote\n")
sys.argv[:] = [zygote, str(connection.detach()), *rest]
runpy.run_path(zygote, run_name="__main__")
