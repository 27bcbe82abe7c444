"""What workers tell each other, when one of them starts, is slow, or does not answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from proxy import siblings
from proxy.canonical import ApiError
from proxy.engine_pool import EnginePool
from proxy.governor import Governor
from proxy.policy_gate import PolicyGate
from proxy.settings import Limits, ProxySettings
from proxy.siblings import Siblings

FIRST, SECOND = "http://127.0.0.1:9", "http://127.0.0.1:10"
Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class NothingServed:
    """A store in which no engine has been published to."""

    def served(self) -> dict[str, Any]:
        return {}


def worker(folder: Path) -> tuple[PolicyGate, EnginePool, Governor]:
    gate = PolicyGate()
    limits = Limits(health_check_s=0)
    settings = ProxySettings(FIRST, "unused", more_engines=(SECOND,), limits=limits)
    pool = EnginePool(settings, gate, settings.engine_urls)
    unused, reader = cast(Any, None), cast(Any, NothingServed())
    return gate, pool, Governor(gate, pool, unused, unused, unused, reader, Siblings(folder))


async def sibling(folder: Path, name: str, answer: Answer) -> asyncio.Server:
    """Another worker, which answers as ``answer`` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told = await answer(json.loads(await reader.readline()))
        writer.write(json.dumps(told).encode() + b"\n")
        writer.close()

    return await asyncio.start_unix_server(serve, folder / f"{name}.sock")


async def tell(folder: Path, message: dict[str, Any]) -> None:
    """Queues ``message`` for the worker of this process."""
    _, writer = await asyncio.open_unix_connection(folder / f"{os.getpid()}.sock")
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def test_a_worker_that_starts_in_the_end_of_a_pause_is_not_left_paused(
    tmp_path: Path,
) -> None:
    asked, resumed = asyncio.Event(), asyncio.Event()

    async def still_paused(_: dict[str, Any]) -> Any:
        asked.set()
        return {"paused": True}

    async def slow(_: dict[str, Any]) -> Any:
        await resumed.wait()
        return {"paused": False}

    await sibling(tmp_path, "paused", still_paused)
    await sibling(tmp_path, "slow", slow)
    gate, _, governor = worker(tmp_path)
    starting = asyncio.create_task(governor.start())
    await asked.wait()
    await tell(tmp_path, {"do": "resume"})
    await asyncio.sleep(0.1)
    resumed.set()
    await starting
    await asyncio.sleep(0.1)
    assert not gate.paused


async def test_a_removed_engine_may_run_another_workers_calls_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float | None] = []
    ask = siblings._ask

    async def watched(path: Path, message: Any, patience_s: float | None) -> Any:
        patience.append(patience_s)
        return await ask(path, message, patience_s)

    async def slow(_: dict[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        return True

    monkeypatch.setattr(siblings, "_ask", watched)
    await sibling(tmp_path, "slow", slow)
    _, pool, governor = worker(tmp_path)
    await pool.start()
    await governor.remove_engine(SECOND)
    assert [state.url for state in pool.states()] == [FIRST]
    assert patience == [None]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_pause_that_a_worker_does_not_hear_of_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    ask = siblings._ask
    heard: list[str] = []

    async def impatient(path: Path, message: Any, _: float | None) -> Any:
        return await ask(path, message, 0.1)

    async def hears(message: dict[str, Any]) -> Any:
        heard.append(message["do"])
        return True

    async def silent(_: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(siblings, "_ask", impatient)
    await sibling(tmp_path, "hears", hears)
    await sibling(tmp_path, "silent", silent)
    gate, _, governor = worker(tmp_path)
    if paused:
        gate.pause()
    with pytest.raises(ApiError):
        await governor.pause(None)
    assert gate.paused is paused
    assert heard == (["pause"] if paused else ["pause", "resume"])
