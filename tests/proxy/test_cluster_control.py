"""What workers tell each other, when one of them starts, is slow, or does not answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from bridle.proxy.cluster import siblings
from bridle.proxy.cluster.cluster_control import ClusterControl
from bridle.proxy.cluster.siblings import Siblings
from bridle.proxy.engines.policy_gate import Policy, PolicyGate
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.served_weights import ServedWeights
from bridle.proxy.settings import Limits, ProxySettings
from bridle.proxy.wire.canonical import ApiError

FIRST, SECOND, THIRD, FOURTH = (f"http://127.0.0.1:{port}" for port in (9, 10, 11, 12))
Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class NothingServed:
    """A store in which no engine has been published to."""

    def served(self) -> dict[str, Any]:
        return {}


class NothingKept:
    """A store that takes every record."""

    async def record_served(self, *_: Any) -> None:
        pass


def worker(folder: Path, name: str | None = None) -> tuple[PolicyGate, EnginePool, ClusterControl]:
    """``name`` stands for the id of a process of its own."""
    gate = PolicyGate()
    limits = Limits(health_check_s=0)
    settings = ProxySettings(FIRST, "unused", more_engines=(SECOND,), limits=limits)
    pool = EnginePool(settings, gate, settings.engine_urls)
    unused, reader, writer = cast(Any, None), cast(Any, NothingServed()), cast(Any, NothingKept())
    among = Siblings(folder)
    if name is not None:
        among._own = folder / f"{name}.sock"
    return gate, pool, ClusterControl(gate, pool, unused, unused, writer, reader, among)


def members(pool: EnginePool) -> dict[str, tuple[int, str | None]]:
    """Version and weights_fingerprint of each engine."""
    serves = {url: engine.serves for url, engine in pool._engines.items()}
    return {url: (one.version, one.fingerprint) for url, one in serves.items()}


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
        return [{"do": "pause", "at": 1.0}]

    async def slow(_: dict[str, Any]) -> Any:
        await resumed.wait()
        return []

    await sibling(tmp_path, "paused", still_paused)
    await sibling(tmp_path, "slow", slow)
    gate, _, cluster_control = worker(tmp_path)
    starting = asyncio.create_task(cluster_control.start())
    await asked.wait()
    await tell(tmp_path, {"do": "resume", "at": 2.0})
    await asyncio.sleep(0.1)
    resumed.set()
    await starting
    await asyncio.sleep(0.1)
    assert not gate.paused


async def test_a_worker_that_starts_has_no_part_in_what_is_asked_of_all(tmp_path: Path) -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    async def slow(_: dict[str, Any]) -> Any:
        asked.set()
        await answers.wait()
        return []

    slow_one = await sibling(tmp_path, "slow", slow)
    _, _, cluster_control = worker(tmp_path)
    start = asyncio.create_task(cluster_control.start())
    await asked.wait()
    slow_one.close()
    (tmp_path / "slow.sock").unlink(missing_ok=True)  # Python 3.13 does so itself
    others = Siblings(tmp_path)
    others._own = None
    assert await others.ask({"do": "state"}) == []
    assert await others.ask({"do": "engines"}) == []
    answers.set()
    await start
    assert [state["version"] for state in await others.ask({"do": "state"})] == [0]
    assert [len(engines) for engines in await others.ask({"do": "engines"})] == [2]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """For how long each sibling that was asked was waited for at most."""
    waited: list[float | None] = []
    ask = siblings._ask

    async def watched(path: Path, message: Any, patience_s: float | None) -> Any:
        waited.append(patience_s)
        return await ask(path, message, patience_s)

    monkeypatch.setattr(siblings, "_ask", watched)
    return waited


async def test_a_removed_engine_may_run_another_workers_calls_for_long(
    tmp_path: Path, patience: list[float | None]
) -> None:
    async def slow(_: dict[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        return True

    await sibling(tmp_path, "slow", slow)
    _, pool, cluster_control = worker(tmp_path)
    await pool.start()
    await cluster_control.remove_engine(SECOND)
    assert [state.url for state in pool.states()] == [FIRST]
    assert patience == [None]


async def test_a_worker_that_starts_waits_for_one_that_hangs(
    tmp_path: Path, patience: list[float | None]
) -> None:
    """Until the supervisor has ended that one: were the start to fail, it would end all."""

    async def slow(_: dict[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        return [{"do": "pause", "at": 1.0}]

    await sibling(tmp_path, "slow", slow)
    gate, _, cluster_control = worker(tmp_path)
    await cluster_control.start()
    assert gate.paused
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
    gate, _, cluster_control = worker(tmp_path)
    if paused:
        gate.pause()
    with pytest.raises(ApiError):
        await cluster_control.pause(None)
    assert gate.paused is paused
    assert heard == (["pause"] if paused else ["pause", "resume"])


async def test_workers_that_are_replaced_at_once_take_up_what_was_changed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def weights_fingerprint(engine: ServedWeights) -> str:
        engine.fingerprint = f"weights {engine.version}"
        return engine.fingerprint

    monkeypatch.setattr(ServedWeights, "learn", weights_fingerprint)
    old_gate, old, knows = worker(tmp_path, "old")
    await knows.start()
    await knows.add_engine(THIRD + "/v1", 1)
    await knows.remove_engine(FIRST)
    await knows.add_engine(FOURTH, 3)
    await knows.remove_engine(SECOND)
    await knows.publish(Policy(3, "tuned"), FOURTH, back=False)
    await knows.remove_engine(FOURTH)
    await knows.add_engine(FIRST, 3)
    await knows.publish(Policy(3, "tuned"), THIRD, back=False)
    await knows.pause(None)
    replaced = [worker(tmp_path, name) for name in ("new", "newer")]
    await asyncio.gather(*(cluster_control.start() for _, _, cluster_control in replaced))
    assert members(old) == {THIRD: (3, "weights 3"), FIRST: (3, "weights 3")}
    for gate, pool, _ in replaced:
        assert members(pool) == members(old)
        assert (gate.policy, gate.paused) == (old_gate.policy, True)


async def test_none_of_the_settings_engines_is_kept_when_all_were_exchanged(tmp_path: Path) -> None:
    _, old, knows = worker(tmp_path, "old")
    await knows.start()
    await knows.add_engine(THIRD, 0)
    await knows.remove_engine(FIRST)
    await knows.remove_engine(SECOND)
    await knows.add_engine(FOURTH, 0)
    await knows.remove_engine(THIRD)
    await knows.add_engine(THIRD, 0)
    _, new, cluster_control = worker(tmp_path, "new")
    await cluster_control.start()
    assert set(members(new)) == set(members(old)) == {THIRD, FOURTH}


async def test_a_sibling_that_hears_of_a_change_late_does_not_take_it_back(tmp_path: Path) -> None:
    removed = {"do": "remove_engine", "url": SECOND, "at": 2.0}
    added = {"do": "add_engine", "url": SECOND, "version": 0, "weights_fingerprint": None}

    async def before(_: dict[str, Any]) -> Any:
        return [{**added, "at": 1.0}]

    async def after(_: dict[str, Any]) -> Any:
        return [removed]

    await sibling(tmp_path, "before", before)
    await sibling(tmp_path, "after", after)
    _, pool, cluster_control = worker(tmp_path)
    await cluster_control.start()
    assert set(members(pool)) == {FIRST}
    await cluster_control._handle({**added, "at": 1.5})
    assert set(members(pool)) == {FIRST}
    await cluster_control._handle({**added, "at": 2.5})
    assert set(members(pool)) == {FIRST, SECOND}


@pytest.mark.parametrize("heard", [False, True])
async def test_an_engine_that_comes_or_goes_while_a_worker_starts_is_known_to_it(
    tmp_path: Path, heard: bool
) -> None:
    """``heard``: the sibling that is asked already answers with the change that it tells."""
    changes = [
        {"do": "add_engine", "url": THIRD, "version": 2, "weights_fingerprint": "third", "at": 1.0},
        {"do": "remove_engine", "url": SECOND, "at": 2.0},
    ]
    asked, told = asyncio.Event(), asyncio.Event()

    async def slow(_: dict[str, Any]) -> Any:
        asked.set()
        await told.wait()
        return changes if heard else []

    await sibling(tmp_path, "slow", slow)
    _, pool, cluster_control = worker(tmp_path)
    starting = asyncio.create_task(cluster_control.start())
    await asked.wait()
    for change in changes:
        await tell(tmp_path, change)
    await asyncio.sleep(0.1)
    told.set()
    await starting
    await asyncio.sleep(0.1)
    assert members(pool) == {FIRST: (0, None), THIRD: (2, "third")}


async def test_of_two_workers_that_each_take_out_another_engine_none_is_left_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def both(_: dict[str, Any]) -> Any:
        return [
            {"do": "remove_engine", "url": url, "at": float(number)}
            for number, url in enumerate((FIRST, SECOND), start=1)
        ]

    await sibling(tmp_path, "both", both)
    _, pool, cluster_control = worker(tmp_path)
    await cluster_control.start()
    assert set(members(pool)) == {SECOND}
    assert caplog.messages == ["engine_kept"]


async def test_the_last_engine_is_removed_nowhere(tmp_path: Path) -> None:
    told: list[str] = []

    async def hears(message: dict[str, Any]) -> Any:
        told.append(message["do"])
        return [] if message["do"] == "changes" else True

    await sibling(tmp_path, "hears", hears)
    _, pool, cluster_control = worker(tmp_path)
    await cluster_control.start()
    await cluster_control.remove_engine(SECOND)
    with pytest.raises(ValueError, match="last"):
        await cluster_control.remove_engine(FIRST)
    assert told == ["changes", "remove_engine"]
    assert set(members(pool)) == {FIRST}
