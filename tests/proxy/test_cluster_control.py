"""Changes that hold for all proxy processes of a deployment, over one store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from sqlalchemy import delete, func, select, update

from bridle.proxy.cluster import cluster_control
from bridle.proxy.cluster.cluster_control import ClusterControl
from bridle.proxy.engines.policy_gate import Policy, PolicyGate, StaleVersion
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.weights import ServedWeights
from bridle.proxy.recording.metrics import Metrics
from bridle.proxy.settings import Limits, ProxySettings
from bridle.proxy.wire.canonical import ApiError
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY
from bridle.store.schema.database import migrate, transaction
from bridle.store.schema.tables import control, writers
from bridle.store.writing.writer import Writer

FIRST, SECOND, THIRD, FOURTH = (f"http://127.0.0.1:{port}" for port in (9, 10, 11, 12))
PLANNER = "http://127.0.0.1:13"
"""Serves the further policy ``planner``."""


@dataclass
class Forgotten:
    """The sessions that a process was asked to forget."""

    ids: list[str] = field(default_factory=list)

    def forget(self, session_id: str) -> None:
        self.ids.append(session_id)


@dataclass
class Process:
    """The parts of one proxy process that a change concerns."""

    gate: PolicyGate
    pool: EnginePool
    planner: EnginePool
    control: ClusterControl
    sessions: Forgotten
    writer: Writer

    def serves(self) -> dict[str, tuple[int, str | None]]:
        """Version and fingerprint of each engine."""
        serves = {url: engine.serves for url, engine in self.pool._engines.items()}
        return {url: (one.version, one.fingerprint) for url, one in serves.items()}

    async def hang(self) -> None:
        """Lives on, and applies nothing any more."""
        await self.control.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path / 'bridle.db'}"
    migrate(found)
    return found


@asynccontextmanager
async def process(
    url: str, engine: str = FIRST, workers: str | None = None
) -> AsyncIterator[Process]:
    limits = Limits(health_check_s=0)
    settings = ProxySettings(engine, url, more_engines=(SECOND,), limits=limits, workers=workers)
    gate, sessions = PolicyGate(), Forgotten()
    pool = EnginePool(settings, gate, settings.engine_urls)
    planner = EnginePool(settings, PolicyGate(), [PLANNER])
    pools = {DEFAULT_POLICY: pool, "planner": planner}
    metrics = Metrics({name: one.gate for name, one in pools.items()})
    with Writer(url) as writer, Reader(url) as reader:
        made = ClusterControl(settings, pools, cast(Any, sessions), metrics, writer, reader)
        await made.start()
        yield Process(gate, pool, planner, made, sessions, writer)
        await made.close()


@pytest.fixture
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines report their version as their fingerprint."""

    async def learn(engine: ServedWeights) -> str:
        engine.fingerprint = f"weights {engine.version}"
        return engine.fingerprint

    monkeypatch.setattr(ServedWeights, "learn", learn)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_control, "_PATIENCE_S", 0.3)


def in_store(process: Process, query: Any) -> Any:
    with transaction(process.writer._engine) as connection:
        return connection.execute(query)


async def holds(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_a_change_is_applied_in_every_process_when_it_returns(
    url: str, fingerprints: None
) -> None:
    async with process(url) as one, process(url) as other:
        await one.control.publish(Policy(3, "tuned"), None, back=False)
        assert other.gate.policy == Policy(3, "tuned")
        assert other.serves() == {FIRST: (3, "weights 3"), SECOND: (3, "weights 3")}
        await other.control.add_engine(THIRD, 3)
        assert one.serves()[THIRD] == (3, "weights 3")
        await one.control.remove_engine(FIRST)
        assert set(other.serves()) == {SECOND, THIRD}
        await one.control.pause(None)
        assert other.gate.paused
        await other.control.resume()
        assert not one.gate.paused
        await one.control.forget_session("sess_1")
        assert other.sessions.ids == ["sess_1"]


async def test_a_further_policy_has_its_own_version_in_every_process(
    url: str, fingerprints: None
) -> None:
    async with process(url) as one, process(url) as other:
        await one.control.publish(Policy(2), None, back=False)
        await one.control.publish(Policy(5, "lora-5"), None, back=False, name="planner")
        async with process(url) as later:
            for each in (one, other, later):
                assert each.gate.policy == Policy(2)
                assert each.planner.gate.policy == Policy(5, "lora-5")
                (served,) = (engine.serves for engine in each.planner._engines.values())
                assert (served.version, served.fingerprint) == (5, "weights 5")
        other.planner.gate.waiting = 4
        state = await one.control.state()
        assert (state.version, state.policies, state.waiting) == (2, {"planner": 5}, 4)
        await other.control.pause(None)
        assert one.planner.gate.paused
        with pytest.raises(KeyError):
            await one.control.publish(Policy(1), None, back=False, name="critic")


async def test_processes_that_start_later_reach_the_same_state(
    url: str, fingerprints: None
) -> None:
    async with process(url) as old:
        await old.control.add_engine(THIRD + "/v1", 1)
        await old.control.remove_engine(FIRST)
        await old.control.add_engine(FOURTH, 3)
        await old.control.remove_engine(SECOND)
        await old.control.publish(Policy(3, "tuned"), FOURTH, back=False)
        await old.control.remove_engine(FOURTH)
        await old.control.add_engine(FIRST, 3)
        await old.control.publish(Policy(3, "tuned"), THIRD, back=False)
        await old.control.pause(None)
        async with process(url) as new, process(url) as newer:
            assert old.serves() == {THIRD: (3, "weights 3"), FIRST: (3, "weights 3")}
            for started in (new, newer):
                assert started.serves() == old.serves()
                assert (started.gate.policy, started.gate.paused) == (old.gate.policy, True)


async def test_an_older_version_is_refused_whichever_process_is_asked(url: str) -> None:
    async with process(url) as one, process(url) as other:
        await one.control.publish(Policy(5), None, back=False)
        with pytest.raises(StaleVersion):
            await other.control.publish(Policy(4), None, back=False)
        await other.control.publish(Policy(2), None, back=True)
        assert (one.gate.version, other.gate.version) == (2, 2)


async def test_of_two_processes_that_each_remove_another_engine_both_keep_the_same_one(
    url: str,
) -> None:
    async with process(url) as one, process(url) as other:
        results = await asyncio.gather(
            one.control.remove_engine(FIRST),
            other.control.remove_engine(SECOND),
            return_exceptions=True,
        )
        refused = [result for result in results if result is not None]
        assert [str(error) for error in refused] == ["the last engine cannot be removed"]
        assert set(one.serves()) == set(other.serves())
        assert len(one.serves()) == 1


async def test_the_calls_of_every_process_at_a_removed_engine_are_waited_for(url: str) -> None:
    async with process(url) as one, process(url) as other:
        engine = other.pool._engines[SECOND]
        engine.running = 1
        removing = asyncio.create_task(one.control.remove_engine(SECOND))
        await holds(lambda: set(other.serves()) == {FIRST})
        await asyncio.sleep(0.4)
        assert not removing.done()
        engine.running = 0
        engine.left()
        await removing


async def test_a_drain_waits_for_the_calls_of_every_process(url: str) -> None:
    async with process(url) as one, process(url) as other:
        other.gate.running = 1
        pausing = asyncio.create_task(one.control.pause(30))
        await holds(lambda: other.gate.paused)
        assert (await one.control.state()).running == 1
        assert not pausing.done()
        other.gate.running = 0
        await pausing


@pytest.mark.parametrize("paused", [False, True])
async def test_a_pause_that_a_process_does_not_apply_is_taken_back(
    url: str, impatient: None, paused: bool
) -> None:
    async with process(url) as one, process(url) as hung:
        if paused:
            await one.control.pause(None)
        await hung.hang()
        with pytest.raises(ApiError, match="do not answer"):
            await one.control.pause(None)
        assert one.gate.paused is paused


async def test_a_dead_process_is_not_waited_for(url: str, impatient: None) -> None:
    async with process(url) as one, process(url) as dead:
        await dead.hang()
        in_store(
            one, update(writers).where(writers.c.id == dead.writer.id).values(process="another")
        )
        await one.control.publish(Policy(3), None, back=False)
        assert one.gate.version == 3


async def test_a_process_whose_lease_has_ended_is_waited_for_again_once_it_is_back(
    url: str,
) -> None:
    async with process(url) as one, process(url) as suspended:
        before = suspended.writer.id
        in_store(one, delete(writers).where(writers.c.id == before))
        suspended.writer._renew()
        await holds(lambda: suspended.control._joined_as != before)
        await holds(lambda: len(one.control._control.others(one.writer.id)) == 1)
        await one.control.publish(Policy(3), None, back=False)
        assert suspended.gate.version == 3


async def test_proxies_of_another_engine_are_another_deployment(url: str) -> None:
    async with process(url) as one, process(url, engine=THIRD) as stranger:
        await one.control.publish(Policy(3), None, back=False)
        await one.control.pause(None)
        await asyncio.sleep(0.2)
        assert (stranger.gate.version, stranger.gate.paused) == (0, False)


async def test_a_pause_ends_with_the_last_process_of_its_deployment(url: str) -> None:
    async with process(url) as one:
        await one.control.publish(Policy(3), None, back=False)
        await one.control.pause(None)
    async with process(url) as later:
        assert (later.gate.version, later.gate.paused) == (3, False)


async def test_a_lone_process_asks_for_no_reports(url: str) -> None:
    async with process(url) as alone:
        await alone.control.state()
        await alone.control.engines()
        await alone.control.forget_session("sess_1")
        assert in_store(alone, select(func.max(control.c.revision))).scalar() is None


async def test_reports_and_seals_leave_no_rows(url: str) -> None:
    async with process(url) as one, process(url):
        await one.control.state()
        await one.control.forget_session("sess_1")
        assert in_store(one, select(func.count()).select_from(control)).scalar() == 0


async def test_metrics_are_those_of_the_workers_of_one_port(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(url, workers="a") as one, process(url, workers="a") as same:
        report = msgspec.structs.replace(same.control._own_report(), pid=7)
        monkeypatch.setattr(same.control, "_own_report", lambda: report)
        async with process(url) as other_port:
            assert b"worker=" not in await other_port.control.metrics()
            other_port.gate.waiting = 5
            exposition = await one.control.metrics()
            for pid in (7, os.getpid()):
                assert f'bridle_waiting_calls{{worker="{pid}"}} 0.0'.encode() in exposition
            assert exposition.count(b"bridle_waiting_calls{") == 2
