"""The types of messages, examined by msgspec before threads use them."""

from __future__ import annotations

import contextlib

import msgspec


def examine(kind: type[msgspec.Struct] = msgspec.Struct) -> None:
    """Have msgspec examine all types of messages.

    It examines a type at its first use, and ends the process if two threads come to that at once
    (seen with msgspec 0.22).
    """
    for one in kind.__subclasses__():
        with contextlib.suppress(TypeError):  # a type that is only written
            msgspec.json.Decoder(one)
        examine(one)
