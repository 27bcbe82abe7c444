"""A benchmark of the slots that sessions occupy while a policy trains, at each staleness bound.

Sessions sleep for lognormal times (σ = 1), roughly as those of agents: a few take far longer than
the others. The collector with its capacity rule and the trainer's preparation are the real ones; a
training step sleeps.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.collector import Collector
from bridle.trainer.config import FilterConfig, GrpoConfig

ENDLESS = 1_000_000
"""The configured number of steps, more than a run takes: the last steps of a run that ends would
leave slots free."""


@dataclass(frozen=True, slots=True)
class CollectSettings:
    slots: int = 64
    group_size: int = 8
    groups_per_step: int = 8
    steps: int = 40
    """Number of measured steps."""
    median_s: float = 0.2
    """The median duration of a session."""
    train_s: float = 0.05
    """Seconds that the update and the publish of a step take."""
    seed: int = 0
    refill: float = 1.0
    """The ``refill`` setting of the step's filters."""
    half_degenerate: bool = False
    """Whether every other group has equal rewards."""


@dataclass(frozen=True, slots=True)
class CollectFigures:
    """The figures of one run at one staleness bound."""

    max_staleness: int
    slot_use: float
    """Share of slot seconds in which a session ran."""
    staleness: int
    """The largest number of versions by which a trained token lagged behind."""
    trained: float
    """Share of the collected sessions that were trained; the others were too old or taught
    nothing."""
    seconds_per_step: float
    live: float
    """The mean number of groups with trained samples per step, divided by the number that a step
    asks for."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


class SleepingSessions:
    """Groups of sleeping sessions that share a fixed number of slots."""

    def __init__(self, settings: CollectSettings, version: Callable[[], int]) -> None:
        self._settings = settings
        self._version = version
        self._times = random.Random(settings.seed)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(settings.slots)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._busy = 0.0
        self._versions: dict[str, int] = {}

    def __enter__(self) -> SleepingSessions:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def start(self, number: int, begun: Callable[[], None]) -> Future[Sequence[str]]:
        seconds = [
            self._settings.median_s * self._times.lognormvariate(0, 1)
            for _ in range(self._settings.group_size)
        ]
        return asyncio.run_coroutine_threadsafe(self._group(number, seconds, begun), self._loop)

    async def _group(
        self, number: int, seconds: Sequence[float], begun: Callable[[], None]
    ) -> list[str]:
        names = [f"{number:06}-{member:03}" for member in range(len(seconds))]
        sessions = zip(names, seconds, strict=True)
        await asyncio.gather(*(self._session(name, each, begun) for name, each in sessions))
        return names

    async def _session(self, name: str, seconds: float, begun: Callable[[], None]) -> None:
        async with self._slots:
            begun()
            with self._lock:
                # All of a session's tokens count as sampled at its start, the worst case.
                self._versions[name] = self._version()
                self._began[name] = time.perf_counter()
            await asyncio.sleep(seconds)
            with self._lock:
                self._busy += time.perf_counter() - self._began.pop(name)

    def busy_seconds(self) -> float:
        """Return the slot seconds in which a session has run so far."""
        now = time.perf_counter()
        with self._lock:
            return self._busy + sum(now - began for began in self._began.values())

    def load(self, name: str) -> Episode:
        number, member = name.split("-")
        sample = Sample(
            session_id=name,
            leaf_call_id=name,
            kind=CallKind.MAIN,
            role=None,
            token_ids=np.arange(2, dtype=np.uint32),
            mask=np.asarray([False, True]),
            logprobs=np.zeros(2, np.float32),
            versions=np.asarray([-1, self._versions[name]]),
            calls=np.asarray([-1, 0], np.int32),
            call_ids=(name,),
            weight=1.0,
        )
        equal = self._settings.half_degenerate and int(number) % 2 == 1
        value = 0.0 if equal else float(member)
        reward = Reward(name, "reward", value, 0.0, source=RewardSource.VERIFIER)
        session = SessionRecord(name, 0.0, group_id=number, outcome="completed")
        return Episode(session, (sample,), (reward,), Conservation(captured=1, trained=1))


def bench_collect(settings: CollectSettings, max_staleness: int) -> CollectFigures:
    """Run ``settings.steps`` steps at one staleness bound."""
    config = GrpoConfig(
        steps=ENDLESS, max_staleness=max_staleness, filters=FilterConfig(refill=settings.refill)
    )
    version = 0
    staleness, taken, trained, live = 0, 0, 0, 0
    with (
        SleepingSessions(settings, lambda: version) as sessions,
        Collector(
            sessions.start, sessions.load, config, per_step=settings.groups_per_step
        ) as collect,
    ):
        started = time.perf_counter()
        for step in range(settings.steps):
            episodes = collect(step, version)
            prepared = prepare(episodes, version, config)
            taken += len(episodes)
            trained += len({item.session for item in prepared.items})
            live += len({item.group for item in prepared.items})
            staleness = max(staleness, int(prepared.staleness.max(initial=0)))
            time.sleep(settings.train_s)
            version += 1
            collect.published(version)
        elapsed = time.perf_counter() - started
        busy = sessions.busy_seconds()
    return CollectFigures(
        max_staleness=max_staleness,
        slot_use=busy / (elapsed * settings.slots),
        staleness=staleness,
        trained=trained / taken,
        seconds_per_step=elapsed / settings.steps,
        live=live / (settings.steps * settings.groups_per_step),
    )
