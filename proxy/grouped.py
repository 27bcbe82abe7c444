"""One query of a server for all calls that ask it the same at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

_MOST: Final = 1000
"""Maximum number of names in a query."""


class Grouped:
    """Whether names are in a set that a server keeps.

    ``among`` is called in a thread and returns those of the given names that are in the set. One
    query runs at a time. The names that are asked for meanwhile are in the next query, so that each
    answer is of a moment after its question.
    """

    def __init__(self, among: Callable[[Sequence[str]], Collection[str]]) -> None:
        self._among = among
        self._asked: dict[str, asyncio.Future[bool]] = {}
        """The names of the next query."""
        self._asking: asyncio.Task[None] | None = None

    async def has(self, name: str) -> bool:
        """Return whether the name is in the set. Raise the errors of ``among``."""
        answer = self._asked.get(name)
        if answer is None:
            answer = self._asked[name] = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(answer)

    async def _ask(self) -> None:
        try:
            while self._asked:
                names = list(self._asked)[:_MOST]
                answers = [self._asked.pop(name) for name in names]
                try:
                    found = await asyncio.to_thread(self._among, names)
                except Exception as error:  # noqa: BLE001 - it is raised where it was asked
                    for answer in answers:
                        answer.set_exception(error)
                        answer.exception()  # Nobody may wait for it any more.
                else:
                    for name, answer in zip(names, answers, strict=True):
                        answer.set_result(name in found)
        finally:
            self._asking = None
