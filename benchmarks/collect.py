"""A benchmark of the slot time that sessions use, and training uses, at each staleness bound.

Sessions last for lognormal times (σ = 1), roughly as those of agents: a few take far longer than
the others. Their tokens are sampled evenly over that time. The collector with its capacity rule and
the trainer's preparation are the real ones; an update sleeps. Sessions sleep too, or they are real
ones (:mod:`bridle.bench.collect_streamed`).
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.prepare import PreparedStep, prepare
from bridle.trainer.collection.sessions import collector_of
from bridle.trainer.config import FilterConfig, GrpoConfig

TOKENS = 8
"""Number of tokens of a session."""
ENDLESS = 1_000_000
"""The configured number of steps, more than a run takes: the last steps of a run that ends would
leave slots free."""


@dataclass(frozen=True, slots=True)
class CollectSettings:
    slots: int = 64
    group_size: int = 8
    groups_per_step: int = 8
    steps: int = 40
    """Number of measured steps, after a fifth as many that fill the slots."""
    median_s: float = 0.2
    """The median duration of a session."""
    train_s: float = 0.05
    """Seconds that the update of a step takes."""
    seed: int = 0
    refill: float = 1.0
    """The ``refill`` setting of the step's filters."""
    half_degenerate: bool = False
    """True if every other group has equal rewards."""
    collection: Literal["groups", "sessions"] = "groups"
    """The unit that a step takes."""


@dataclass(frozen=True, slots=True)
class CollectFigures:
    """The figures of one run at one staleness bound."""

    max_staleness: int
    slot_use: float
    """Share of slot seconds in which a session ran."""
    useful: float
    """Share of slot seconds whose tokens were trained."""
    deciles: tuple[float, ...]
    """Share of the tokens that were trained, of the collected sessions by decile of duration."""
    mean_lag: float
    """The mean number of versions by which a trained token lagged behind."""
    staleness: int
    """The largest such number."""
    trained: float
    """Share of the collected sessions that were trained; the others were too old or taught
    nothing."""
    seconds_per_step: float
    live: float
    """The mean number of groups with trained samples per step, divided by the number that a step
    asks for."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


class SlottedSessions(ABC):
    """Groups of sessions that share a fixed number of slots, and the policy that they use."""

    def __init__(self, settings: CollectSettings) -> None:
        self._settings = settings
        self._times = random.Random(settings.seed)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(settings.slots)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._lock = threading.Lock()
        self._began: set[float] = set()
        self._busy = 0.0
        self.seconds: dict[str, float] = {}
        """The duration of each session that ended, by its id."""

    @abstractmethod
    async def lead(self, group: int, member: int, seconds: float) -> str:
        """Lead a session that takes about ``seconds``; return its id."""

    @abstractmethod
    def load(self, session_id: str) -> Episode:
        """Return a session that has ended."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Have sessions sample from ``version`` from now on, also those that run."""

    def __enter__(self) -> Self:
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

    def start(
        self, number: int, begun: Callable[[], None], ended: Callable[[str], None]
    ) -> Future[Sequence[str]]:
        group = [
            (member, self._settings.median_s * self._times.lognormvariate(0, 1))
            for member in range(self._settings.group_size)
        ]
        return asyncio.run_coroutine_threadsafe(
            self._group(number, group, begun, ended), self._loop
        )

    async def _group(
        self,
        number: int,
        group: Sequence[tuple[int, float]],
        begun: Callable[[], None],
        ended: Callable[[str], None],
    ) -> list[str]:
        sessions = (self._session(number, *each, begun, ended) for each in group)
        return list(await asyncio.gather(*sessions))

    async def _session(
        self,
        number: int,
        member: int,
        seconds: float,
        begun: Callable[[], None],
        ended: Callable[[str], None],
    ) -> str:
        async with self._slots:
            begun()
            began = time.perf_counter()
            with self._lock:
                self._began.add(began)
            session_id = await self.lead(number, member, seconds)
            with self._lock:
                self._began.remove(began)
                self.seconds[session_id] = time.perf_counter() - began
                self._busy += self.seconds[session_id]
        ended(session_id)
        return session_id

    def busy_seconds(self) -> float:
        """Return the slot seconds in which a session has run so far."""
        now = time.perf_counter()
        with self._lock:
            return self._busy + sum(now - began for began in self._began)


class SleepingSessions(SlottedSessions):
    """Sessions that sleep between their tokens, which are made up."""

    def __init__(self, settings: CollectSettings) -> None:
        super().__init__(settings)
        self._version = 0
        self._versions: dict[str, list[int]] = {}

    def publish(self, version: int) -> None:
        self._version = version

    async def lead(self, group: int, member: int, seconds: float) -> str:
        name = f"{group:06}-{member:03}"
        versions = []
        for _ in range(TOKENS):
            versions.append(self._version)
            await asyncio.sleep(seconds / TOKENS)
        self._versions[name] = versions
        return name

    def load(self, session_id: str) -> Episode:
        number, member = session_id.split("-")
        sample = Sample(
            session_id=session_id,
            leaf_call_id=session_id,
            kind=CallKind.MAIN,
            role=None,
            token_ids=np.arange(TOKENS + 1, dtype=np.uint32),
            mask=np.arange(TOKENS + 1) > 0,
            logprobs=np.zeros(TOKENS + 1, np.float32),
            versions=np.asarray([-1, *self._versions[session_id]]),
            calls=np.asarray([-1, *[0] * TOKENS], np.int32),
            call_ids=(session_id,),
            weight=1.0,
        )
        equal = self._settings.half_degenerate and int(number) % 2 == 1
        value = 0.0 if equal else float(member)
        reward = Reward(session_id, "reward", value, 0.0, source=RewardSource.VERIFIER)
        session = SessionRecord(session_id, 0.0, group_id=number, outcome="completed")
        return Episode(session, (sample,), (reward,), Conservation(captured=TOKENS, trained=TOKENS))


def bench_collect(
    settings: CollectSettings,
    max_staleness: int,
    of: Callable[[CollectSettings], SlottedSessions] = SleepingSessions,
) -> CollectFigures:
    """Run ``settings.steps`` steps at one staleness bound, after some that fill the slots.

    ``of`` makes the sessions.
    """
    config = GrpoConfig(
        steps=ENDLESS,
        max_staleness=max_staleness,
        collection=settings.collection,
        filters=FilterConfig(refill=settings.refill),
    )
    version = 0
    taken = _Taken()
    with (
        of(settings) as sessions,
        collector_of(
            sessions.start,
            sessions.load,
            config,
            per_step=settings.groups_per_step,
            group_size=settings.group_size,
        ) as collect,
    ):
        started, busy = time.perf_counter(), 0.0
        for step in range(-(settings.steps // 5), settings.steps):
            if step == 0:
                started, busy = time.perf_counter(), sessions.busy_seconds()
            episodes = collect(max(step, 0), version)
            prepared = prepare(episodes, version, config, earlier=collect.earlier())
            if step >= 0:
                taken.add(prepared, [sessions.seconds[one.session.id] for one in episodes])
            time.sleep(settings.train_s)
            version += 1
            sessions.publish(version)
            collect.published(version)
        elapsed = time.perf_counter() - started
        busy = sessions.busy_seconds() - busy
    seconds, shares = np.asarray(taken.seconds), np.asarray(taken.shares)
    lags = np.concatenate(taken.lags)
    by_length = np.array_split(shares[np.argsort(seconds)], 10)
    return CollectFigures(
        max_staleness=max_staleness,
        slot_use=busy / (elapsed * settings.slots),
        useful=float(seconds @ shares) / (elapsed * settings.slots),
        deciles=tuple(float(np.mean(part)) for part in by_length),
        mean_lag=float(lags.mean()),
        staleness=int(lags.max()),
        trained=taken.trained / len(seconds),
        seconds_per_step=elapsed / settings.steps,
        live=taken.live / (settings.steps * settings.groups_per_step),
    )


@dataclass(slots=True)
class _Taken:
    """The sessions that the measured steps took."""

    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Share of each session's tokens that were trained."""
    lags: list[NDArray[np.int64]] = field(default_factory=list)
    trained: int = 0
    live: int = 0

    def add(self, prepared: PreparedStep, seconds: Sequence[float]) -> None:
        self.seconds += seconds
        self.shares += [account.trained / account.captured for account in prepared.accounts]
        self.lags.append(prepared.staleness)
        self.trained += len({item.session for item in prepared.items})
        self.live += len({item.group for item in prepared.items})
