"""Commands of a page, as a reader types them."""

from __future__ import annotations

import re
import socket

WAIT = "timeout 60 sh -c 'until curl -sf -o /dev/null {}; do sleep 0.2; done'"


def console_blocks(text: str) -> list[str]:
    return re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
