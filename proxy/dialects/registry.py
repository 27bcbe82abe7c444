"""The dialects that a proxy serves: the built-in ones, and those that others add.

An installed distribution adds a :class:`~bridle.proxy.dialects.dialect.Dialect` by an entry point
of the group ``bridle.dialects``, and the setting ``dialects`` names one as ``FILE.py:NAME``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bridle.errors import UsageError
from bridle.proxy.dialects.chat.dialect import CHAT as CHAT
from bridle.proxy.dialects.chat.dialect import COMPLETIONS as COMPLETIONS
from bridle.proxy.dialects.dialect import LONGEST_NAME, Dialect, Provider
from bridle.proxy.dialects.google.dialect import GOOGLE as GOOGLE
from bridle.proxy.dialects.messages.dialect import MESSAGES as MESSAGES
from bridle.proxy.dialects.responses.dialect import RESPONSES as RESPONSES
from bridle.registry import Registry

DIALECTS: Final[Registry[Dialect]] = Registry("dialect", "bridle.dialects")
BUILT_IN: Final = (GOOGLE, MESSAGES, RESPONSES, COMPLETIONS, CHAT)
for _dialect in BUILT_IN:
    DIALECTS.register(_dialect.name, _dialect)


def served(named: Iterable[str] = ()) -> tuple[Dialect, ...]:
    """Return the dialects in the order in which their paths are tried.

    They are the built-in and installed dialects, and those ``named`` otherwise. Chat is the last.

    Raise :class:`bridle.errors.UsageError` for one that cannot be loaded, is no dialect, or has a
    name that another has or that is too long.
    """
    chosen: dict[str, Dialect] = {}
    for name in (*DIALECTS.names(), *named):
        dialect = DIALECTS.get(name)
        if not isinstance(dialect, Dialect):
            raise UsageError(f"{name} is no dialect but a {type(dialect).__name__}: name a Dialect")
        if not 0 < len(dialect.name) <= LONGEST_NAME:
            raise UsageError(f"dialect {name}: its name must have 1 to {LONGEST_NAME} characters")
        if chosen.setdefault(dialect.name, dialect) is not dialect:
            raise UsageError(
                f"dialect {name}: there is a dialect {dialect.name} already; rename it"
            )
    # Chat has the paths of all models, and the errors of paths that are no dialect's.
    return tuple(sorted(chosen.values(), key=lambda dialect: dialect is CHAT))


def providers(dialects: Iterable[Dialect]) -> tuple[Provider, ...]:
    """Return the providers of ``dialects``, each once."""
    return tuple({one.provider.name: one.provider for one in dialects}.values())
