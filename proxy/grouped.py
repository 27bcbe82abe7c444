"""One query of a server for all calls that ask it the same at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

_PART: Final = 4
"""A query has one of this many parts of the names that wait. With all of them in one, calls would
go on in step, and the processors of engine, proxy and server would wait for each other."""


class Grouped:
    """True if names are in a set that a server keeps.

    ``among`` is called in a thread and returns those of the given names that are in the set. One
    query runs at a time. The names that are asked for meanwhile are in the next ones, so that each
    answer is of a moment after its question.
    """

    def __init__(self, among: Callable[[Sequence[str]], Collection[str]]) -> None:
        self._among = among
        self._asked: dict[str, asyncio.Future[bool]] = {}
        """The names of the next query."""
        self._asking = False

    async def has(self, name: str) -> bool:
        """Return whether the name is in the set. Raise the errors of ``among``."""
        answer = self._asked.get(name)
        if answer is None:
            answer = self._asked[name] = asyncio.get_running_loop().create_future()
        if not self._asking:
            self._ask()
        return await asyncio.shield(answer)

    def _ask(self) -> None:
        """Start the next query; it starts the one after it."""
        names = list(self._asked)[: max(1, len(self._asked) // _PART)]
        answers = {name: self._asked.pop(name) for name in names}
        self._asking = True
        query = asyncio.get_running_loop().run_in_executor(None, self._among, names)
        query.add_done_callback(partial(self._answer, answers))

    def _answer(
        self, answers: Mapping[str, asyncio.Future[bool]], query: asyncio.Future[Collection[str]]
    ) -> None:
        self._asking = False
        if self._asked:
            self._ask()
        error = query.exception()
        for name, answer in answers.items():
            if error is None:
                answer.set_result(name in query.result())
            else:
                answer.set_exception(error)
                answer.exception()  # Nobody may wait for it any more.
