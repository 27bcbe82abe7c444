"""Changes that hold for all proxy processes of a deployment, over one store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from bridle.proxy import deployment
from bridle.proxy.deployment import Deployment
from bridle.proxy.engines.pool import EnginePool, Policy, PolicyGate
from bridle.proxy.engines.weights import ServedWeights
from bridle.proxy.settings import Limits, ProxySettings
from bridle.proxy.wire.canonical import ApiError
from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.operations.gates import StaleVersion
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY
from bridle.store.schema.database import migrate, transaction
from bridle.store.schema.tables import writers
from bridle.store.writing.writer import Writer

FIRST, SECOND, THIRD, FOURTH = (f"http://127.0.0.1:{port}" for port in (9, 10, 11, 12))
PLANNER = "http://127.0.0.1:13"
"""Serves the further policy ``planner``."""


@dataclass
class Process:
    """The parts of one proxy process that a change concerns."""

    gate: PolicyGate
    pool: EnginePool
    planner: EnginePool
    control: Deployment
    writer: Writer

    def serves(self) -> dict[str, tuple[int, str | None]]:
        """Version and fingerprint of each engine."""
        serves = {url: engine.serves for url, engine in self.pool._engines.items()}
        return {url: (one.version, one.fingerprint) for url, one in serves.items()}

    async def hang(self) -> None:
        """Lives on, and reads nothing by itself any more."""
        await self.control._looks.close()

    async def enter(self) -> int:
        """Start a call; return the version that it starts under."""
        await self.gate.passed()
        return self.gate.version


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path / 'bridle.db'}"
    migrate(found)
    return found


@asynccontextmanager
async def process(url: str, engine: str = FIRST, **fields: Any) -> AsyncIterator[Process]:
    fields = {"limits": Limits(health_check_s=0, store_patience_s=0.2), **fields}
    settings = ProxySettings(
        engine, url, more_engines=(SECOND,), policies={"planner": (PLANNER,)}, **fields
    )
    pool = EnginePool(settings, settings.engine_urls)
    planner = EnginePool(settings, [PLANNER])
    pools = {DEFAULT_POLICY: pool, "planner": planner}
    with Writer(url) as writer, Reader(url) as reader:
        made = Deployment(settings, pools, writer, reader)
        await made.start()
        yield Process(pool.gate, pool, planner, made, writer)
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
    monkeypatch.setattr(deployment, "FRESH_S", 0.3)


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
        assert other.serves()[THIRD] == (3, "weights 3")
        await holds(lambda: one.serves().get(THIRD) == (3, "weights 3"))
        await one.control.remove_engine(FIRST)
        assert set(other.serves()) == {SECOND, THIRD}
        await one.control.pause(None)
        assert other.gate.paused
        await other.control.resume()
        assert not one.gate.paused


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
        await other.control.pause(None)
        await other.control.resume()
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
                await holds(lambda started=started: started.serves() == old.serves())
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
        await holds(lambda: one.control._store.others(one.writer.id)[0].report.get("running") == 1)
        assert (await one.control.state()).running == 1
        assert not pausing.done()
        other.gate.running = 0
        await pausing


async def test_no_call_starts_under_the_old_version_in_a_process_that_reads_nothing_by_itself(
    url: str, impatient: None
) -> None:
    async with process(url) as one, process(url) as hung:
        await hung.hang()
        await one.control.publish(Policy(3), None, back=False)
        assert hung.gate.version == 0
        assert await hung.enter() == 3
        await one.control.pause(0)
        waiting = asyncio.create_task(hung.enter())
        await holds(lambda: hung.gate.paused)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await one.control.resume()
        await hung.control._look()
        assert await waiting == 3


async def test_a_change_returns_once_the_others_have_read_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "FRESH_S", 60.0)
    async with process(url) as one, process(url) as other, asyncio.timeout(30):
        await one.control.publish(Policy(3), None, back=False)
        assert other.gate.version == 3, "its running calls have the version, too"


async def test_a_dead_process_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "FRESH_S", 60.0)
    async with process(url) as one, process(url) as dead, asyncio.timeout(30):
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
        await holds(lambda: len(one.control._store.others(one.writer.id)) == 1)
        await one.control.publish(Policy(3), None, back=False)
        assert suspended.gate.version == 3


async def test_a_store_that_cannot_be_read_holds_calls_for_a_while(
    url: str,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with process(url) as one:
        away = [True]
        revision, is_sealed = one.control._store.revision, one.control._store.is_sealed

        def failing(query: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def ask(*values: Any) -> Any:
                if away:
                    raise StoreUnavailable("away")
                return query(*values)

            return ask

        monkeypatch.setattr(one.control._store, "revision", failing(revision))
        monkeypatch.setattr(one.control._store, "is_sealed", failing(is_sealed))
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(0.5)
        assert [line.message for line in caplog.records].count("gates_not_read") == 1
        for asked in (one.enter, lambda: one.control.is_sealed("ses_1")):
            with pytest.raises(ApiError) as refused:
                await asked()
            assert refused.value.kind == "store_unavailable"
        waiting = asyncio.create_task(one.enter())
        await asyncio.sleep(0.05)
        away.clear()
        assert await waiting == 0


async def test_proxies_of_another_engine_are_another_deployment(url: str) -> None:
    async with process(url) as one, process(url, engine=THIRD) as stranger:
        await one.control.publish(Policy(3), None, back=False)
        await one.control.pause(None)
        await stranger.control._look()
        assert (stranger.gate.version, stranger.gate.paused) == (0, False)


async def test_a_pause_ends_with_the_last_process_of_its_deployment(url: str) -> None:
    async with process(url) as one:
        await one.control.publish(Policy(3), None, back=False)
        await one.control.pause(None)
    async with process(url) as later:
        assert (later.gate.version, later.gate.paused) == (3, False)


async def test_an_engine_that_no_one_knows_is_refused(url: str) -> None:
    async with process(url) as one:
        with pytest.raises(NotFound):
            await one.control.remove_engine(THIRD)
        with pytest.raises(NotFound):
            await one.control.publish(Policy(1), THIRD, back=False)
        with pytest.raises(ValueError, match="serves the policy planner"):
            await one.control.add_engine(PLANNER, 0)
        with pytest.raises(ValueError, match="not the URL of an engine"):
            await one.control.add_engine("file:///etc/passwd", 0)
        assert set(one.serves()) == {FIRST, SECOND}


async def test_an_engine_that_is_removed_while_it_is_asked_for_its_weights_stays_removed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(url) as one:

        async def learn(engine: str | None) -> dict[str, str]:
            raise NotFound("there is no engine")

        monkeypatch.setattr(one.pool, "learn_fingerprints", learn)
        await one.control.publish(Policy(2), None, back=False)
        assert one.serves() == {FIRST: (2, None), SECOND: (2, None)}
