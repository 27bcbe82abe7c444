"""A benchmark of staleness: whether a policy keeps what it learned when its sessions lag behind.

The task is made by rule. A session has three turns. In each the policy sees a symbol and must
answer with a tool call of three tokens: an opening, the symbol's argument, an end. The tool returns
the next symbol, drawn at random. The reward is the share of the turns with a right answer.

The policy is the tiny transformer of :mod:`bridle.recipes.models.tiny`, trained on right answers
until it gives about half of them. From then on it is trained by the trainer's own parts, from
:func:`bridle.trainer.batch.prepare.prepare` to :func:`bridle.trainer.learner.update.update_policy`,
on sessions that were sampled with the weights of ``lag`` steps ago. A run has collapsed if its mean
reward over the last third of its steps is below 0.8, which every on-policy run reaches.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.bench.staleness_clock import Clock, in_turn
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.session_book import SessionBook
from bridle.trainer.config import AdvantageConfig, GrpoConfig, LossConfig, OptimizerConfig
from bridle.trainer.learner.optimizer import make_optimizer
from bridle.trainer.learner.update import update_policy
from bridle.trainer.policy.model import load_policy
from bridle.trainer.report import StepReport

TURNS: Final = 3
SYMBOLS: Final = 8
GOOD: Final = 0.8
"""The mean reward over the last third of a run below which the run has collapsed."""
_BEGIN, _CALL, _END, _RESULT, _FIRST_SYMBOL = range(5)
_REPLY: Final = 3
"""Number of tokens per answer."""


@dataclass(frozen=True, slots=True)
class StalenessSettings:
    steps: int = 75
    groups: int = 16
    group_size: int = 8
    rate: float = 1e-3
    warmth: float = 0.5
    """Share of right answers when the training begins."""
    hidden: int = 128
    by_sessions: bool = False
    """True if sessions take time and are collected one by one, where they may lag."""


@dataclass(frozen=True, slots=True)
class StalenessRun:
    """The result of one seed of a loss at a lag."""

    trust_region: str
    importance: str
    lag: int
    seed: int
    rewards: list[float]
    """The mean reward of each step's sessions."""
    outside: float
    """Share of the trained tokens that were outside the trust region."""
    effective: float
    """The effective sample size as a share of the tokens, averaged over the steps."""
    mean_lag: float
    """The mean number of versions by which a trained token lagged behind."""
    time: float
    """The durations of a middling session that the run took, if steps take no time: those of
    collecting by sessions, or else of waiting for all sessions of each step."""

    @property
    def final(self) -> float:
        """Mean reward over the last third of the steps."""
        return fmean(self.rewards[-(len(self.rewards) // 3) :])

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "final": self.final, "collapsed": self.final < GOOD}


Job = tuple[LossConfig, int, int, StalenessSettings]
"""A loss, a lag, a seed and the settings of a run."""


def bench_staleness(jobs: Sequence[Job], processes: int = 1) -> Iterator[StalenessRun]:
    """Run all jobs, and yield each run when it ends."""
    if processes == 1:
        for job in jobs:
            yield run_with_lag(*job)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for done in as_completed([pool.submit(run_with_lag, *job) for job in jobs]):
            yield done.result()


def run_with_lag(
    loss: LossConfig, lag: int, seed: int, settings: StalenessSettings
) -> StalenessRun:
    """Train one policy on sessions that lag behind.

    They are sampled with the weights of ``lag`` steps ago, or, with ``settings.by_sessions`` and a
    lag, over time with those of each moment.
    """
    rng = np.random.default_rng(seed)
    model, sampler = _policies(seed, settings)
    _warm_up(model, settings, rng)
    over_time = settings.by_sessions and lag > 0
    config = GrpoConfig(
        max_staleness=lag,
        collection="sessions" if over_time else "groups",
        advantages=AdvantageConfig("leave_one_out" if settings.by_sessions else "grpo"),
        loss=loss,
        optimizer=OptimizerConfig(learning_rate=settings.rate, warmup_steps=0),
    )
    optimizer = make_optimizer(model, config.optimizer)
    clock = _clock(model, config, settings, rng)
    kept: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)
    rewards: list[float] = []
    drifts: list[dict[str, float]] = []
    lags: list[int] = []
    passed = 0.0
    for version in range(settings.steps):
        earlier: list[Episode] = []
        if over_time:
            episodes, earlier = clock.step(version, settings.steps - version)
            passed = clock.now
        else:
            kept.append(deepcopy(model.state_dict()))
            sampler.load_state_dict(kept[0])
            episodes = _sessions(sampler, version - (len(kept) - 1), version, settings, rng)
            passed += in_turn(len(episodes), np.random.default_rng((seed, version)))
        rewards.append(fmean(each.rewards[0].value for each in episodes))
        prepared = prepare(episodes, version, config, earlier=earlier)
        lags += prepared.staleness.tolist()
        if prepared.items:
            update = update_policy(
                model, optimizer, prepared.items, config, step=version, version=version
            )
            report = StepReport(
                version, version + 1, len(episodes), prepared, update, None, settings.rate
            )
            drifts.append(report.metrics())
    return StalenessRun(
        loss.trust_region,
        loss.importance,
        lag,
        seed,
        rewards,
        _mean(drifts, "importance/outside"),
        _mean(drifts, "importance/effective"),
        fmean(lags) if lags else 0.0,
        passed,
    )


def _clock(
    model: nn.Module, config: GrpoConfig, settings: StalenessSettings, rng: np.random.Generator
) -> Clock[_Session]:
    per_step = settings.groups * settings.group_size
    return Clock(
        SessionBook(per_step, settings.group_size, config.max_staleness, per_step),
        config,
        slots=per_step,
        turns=TURNS,
        rng=rng,
        begin=lambda number: _group(str(number), rng.integers(0, SYMBOLS, TURNS), settings),
        turn=lambda sessions, version: _turn(model, sessions, version, rng),
        episode=_Session.episode,
    )


def _mean(metrics: Sequence[dict[str, float]], name: str) -> float:
    return fmean(each[name] for each in metrics if name in each) if metrics else 0.0


def _policies(seed: int, settings: StalenessSettings) -> tuple[nn.Module, nn.Module]:
    """Return the same policy twice: one to be trained, and one to sample from."""
    shape = TinyShape(hidden=settings.hidden, intermediate=2 * settings.hidden, context=128)
    with TemporaryDirectory(prefix="bridle-staleness-") as folder:
        directory = Path(folder)
        make_policy(directory, shape, vocab_size=_FIRST_SYMBOL + SYMBOLS, seed=seed)
        return load_policy(directory), load_policy(directory)


def _right_answers(symbols: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tool call that each of ``N`` symbols asks for, ``int64[N, 3]``."""
    arguments = _FIRST_SYMBOL + (symbols * 5 + 3) % SYMBOLS
    return np.stack([np.full_like(symbols, _CALL), arguments, np.full_like(symbols, _END)], 1)


def _shown(marker: int, symbols: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([np.full_like(symbols, marker), _FIRST_SYMBOL + symbols], 1)


def _warm_up(model: nn.Module, settings: StalenessSettings, rng: np.random.Generator) -> None:
    """Train on right answers until the policy samples the configured share of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampled = np.tile(np.repeat([False, True], [2, _REPLY]), TURNS)
    for _ in range(1000):
        parts = []
        for turn in range(TURNS):
            symbols = rng.integers(0, SYMBOLS, 64)
            parts += [_shown(_RESULT if turn else _BEGIN, symbols), _right_answers(symbols)]
        ids = torch.from_numpy(np.concatenate(parts, 1))
        logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        chosen = logprobs.gather(2, ids[:, 1:, None])[:, torch.from_numpy(sampled[1:]), 0]
        right = chosen.detach().reshape(-1, TURNS, _REPLY).sum(2).exp().mean()
        if right >= settings.warmth:
            return
        optimizer.zero_grad()
        (-chosen.mean()).backward()
        optimizer.step()


@dataclass(slots=True, eq=False)
class _Session:
    """A session on its way. Those of one group see the same symbols."""

    group: str
    member: int
    symbols: NDArray[np.int64]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: list[int] = field(default_factory=list)
    """The policy version of each turn so far."""
    right: list[bool] = field(default_factory=list)

    def episode(self) -> Episode | None:
        """Return the session if it has all of its turns."""
        if len(self.right) < TURNS:
            return None
        return _episode(self, np.repeat(self.versions, 2 + _REPLY), fmean(self.right))


def _group(name: str, symbols: NDArray[np.int64], settings: StalenessSettings) -> list[_Session]:
    nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return [_Session(name, member, symbols, *nothing) for member in range(settings.group_size)]


def _sessions(
    sampler: nn.Module,
    version: int,
    step: int,
    settings: StalenessSettings,
    rng: np.random.Generator,
) -> list[Episode]:
    """Sample the sessions of a step, all with the same weights."""
    symbols = rng.integers(0, SYMBOLS, (settings.groups, TURNS))
    groups = [_group(f"{step}-{at}", each, settings) for at, each in enumerate(symbols)]
    sessions = [session for group in groups for session in group]
    for _ in range(TURNS):
        _turn(sampler, sessions, version, rng)
    return [episode for one in sessions if (episode := one.episode()) is not None]


@torch.no_grad()
def _turn(
    sampler: nn.Module, sessions: Sequence[_Session], version: int, rng: np.random.Generator
) -> None:
    at_turn: dict[int, list[_Session]] = {}
    for session in sessions:
        at_turn.setdefault(len(session.right), []).append(session)
    for turn, own in at_turn.items():
        seen = np.asarray([session.symbols[turn] for session in own])
        ids = np.stack([session.ids for session in own])
        ids = np.concatenate([ids, _shown(_RESULT if turn else _BEGIN, seen)], 1)
        logprobs = np.stack([session.logprobs for session in own])
        logprobs = np.concatenate([logprobs, np.zeros((len(own), 2), np.float32)], 1)
        for _ in range(_REPLY):
            logits = sampler(input_ids=torch.from_numpy(ids)).logits[:, -1]
            scores = logits.log_softmax(-1).numpy()
            # Gumbel's trick: the largest of logits and noise is drawn as the logits say.
            drawn = (scores + rng.gumbel(size=scores.shape)).argmax(1)[:, None]
            ids = np.concatenate([ids, drawn], 1)
            logprobs = np.concatenate([logprobs, np.take_along_axis(scores, drawn, 1)], 1)
        right = (ids[:, -_REPLY:] == _right_answers(seen)).all(1)
        for at, session in enumerate(own):
            session.ids, session.logprobs = ids[at], logprobs[at]
            session.versions.append(version)
            session.right.append(bool(right[at]))


def _episode(session: _Session, versions: NDArray[np.int64], reward: float) -> Episode:
    name = f"{session.group}-{session.member}"
    mask = np.tile(np.repeat([False, True], [2, _REPLY]), TURNS)
    turns = np.repeat(np.arange(TURNS), 2 + _REPLY)
    tokens = int(mask.sum())
    sample = Sample(
        session_id=name,
        leaf_call_id=f"{name}/{TURNS - 1}",
        kind=CallKind.MAIN,
        role=None,
        token_ids=session.ids.astype(np.uint32),
        mask=mask,
        logprobs=session.logprobs,
        versions=np.where(mask, versions, -1),
        calls=np.where(mask, turns, -1).astype(np.int32),
        call_ids=tuple(f"{name}/{turn}" for turn in range(TURNS)),
        weight=1.0,
    )
    return Episode(
        SessionRecord(name, 0.0, group_id=session.group, outcome="completed"),
        (sample,),
        (Reward(name, "reward", reward, 0.0, source=RewardSource.VERIFIER),),
        Conservation(captured=tokens, trained=tokens),
    )


def jobs_of(
    losses: Sequence[LossConfig],
    lags: Sequence[int],
    seeds: Sequence[int],
    settings: StalenessSettings,
) -> list[Job]:
    """Return jobs for every loss at every lag with every seed.

    All jobs of one seed come before the next.
    """
    return [(loss, lag, seed, settings) for seed in seeds for loss in losses for lag in lags]


def losses_of(trust_regions: Sequence[str], importances: Sequence[str]) -> list[LossConfig]:
    """Return the default loss with each combination of trust region and importance weights."""
    default = LossConfig()
    return [
        replace(default, trust_region=region, importance=importance)
        for region in trust_regions
        for importance in importances
    ]
