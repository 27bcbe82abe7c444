"""The import formats: the open set from which ``bridle import --format`` takes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import orjson

from bridle.reconstruct.imports.turns import ImportedSession, NotReadable
from bridle.registry import Registry

ReadSessions = Callable[[Path], Iterator[ImportedSession]]
"""A format: a function that yields a file's sessions. It raises
:class:`bridle.reconstruct.imports.turns.NotReadable`."""

_HERE: Final = "bridle.reconstruct.imports"

IMPORTS: Final[Registry[ReadSessions]] = Registry(
    "import",
    "bridle.imports",
    {
        "chat": f"{_HERE}.chat:read_chat",
        "atif": f"{_HERE}.atif:read_atif",
        "claude-code": f"{_HERE}.claude_code:read_claude_code",
        "codex": f"{_HERE}.codex:read_codex",
        "otel": f"{_HERE}.otel:read_otel",
    },
)
"""The import formats by name."""

_KEYS: Final = (
    ("chat", {"messages"}),
    ("atif", {"schema_version", "steps"}),
    ("claude-code", {"sessionId"}),
    ("codex", {"type", "payload"}),
    ("otel", {"resourceSpans"}),
    ("otel", {"context", "attributes"}),
)
"""Keys that the objects of a format have, in the order in which they are looked for."""


def recognised(path: Path) -> str:
    """Return the name of the format that a file seems to have, by its first JSON object.

    Raise :class:`bridle.reconstruct.imports.turns.NotReadable`.
    """
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    for text in (first, path.read_bytes()):
        try:
            keys = set(orjson.loads(text))
        except (orjson.JSONDecodeError, TypeError):
            continue
        for name, needed in _KEYS:
            if needed <= keys:
                return name
    raise NotReadable(f"the format of {path} is not recognised: give --format {IMPORTS.forms}")
