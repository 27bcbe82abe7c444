"""Questions that are asked at the same time share a query, and each answer is newer than it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from bridle.proxy.grouped import Grouped


async def test_names_that_are_asked_for_during_a_query_share_the_next_ones() -> None:
    queries: list[list[str]] = []
    asked, held = threading.Event(), threading.Event()

    def among(names: Sequence[str]) -> set[str]:
        queries.append(list(names))
        asked.set()
        held.wait(30)
        return {name for name in names if name.startswith("in")}

    grouped = Grouped(among)
    first = asyncio.create_task(grouped.has("in-0"))
    assert await asyncio.to_thread(asked.wait, 30)
    names = [f"{'in' if n % 2 else 'out'}-{n}" for n in range(40)]
    others = [asyncio.create_task(grouped.has(name)) for name in [*names, *names, "in-0"]]
    await asyncio.sleep(0)
    held.set()
    assert await first
    assert await asyncio.gather(*others) == [n % 2 == 1 for n in range(40)] * 2 + [True]
    assert [name for query in queries for name in query] == ["in-0", *names, "in-0"]
    assert len(queries[1]) == 10, "a quarter of those that wait"
    assert len(queries) <= 18


async def test_an_error_is_raised_to_all_who_asked_and_the_next_question_is_asked() -> None:
    broken = True

    def among(names: Sequence[str]) -> Sequence[str]:
        if broken:
            raise OSError("away")
        return names

    grouped = Grouped(among)
    failed = await asyncio.gather(grouped.has("a"), grouped.has("b"), return_exceptions=True)
    assert [type(one) for one in failed] == [OSError, OSError]
    broken = False
    assert await grouped.has("a")


async def test_a_question_that_is_cancelled_does_not_cancel_the_others() -> None:
    held = threading.Event()

    def among(names: Sequence[str]) -> Sequence[str]:
        held.wait(30)
        return names

    grouped = Grouped(among)
    gone, stays = (asyncio.create_task(grouped.has("a")) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    held.set()
    assert await stays
