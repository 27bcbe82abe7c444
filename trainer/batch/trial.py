"""A trial of the parts of credit and filters on made-up sessions, before a run collects its first.

The sessions are three of one group, each of two calls, with the rewards 1, 0 and 0.5. Their task is
the run's first one. If the run's tasks are not known, a part that reads the task's payload is not
judged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample, Turn
from bridle.registry import Unjudged
from bridle.store.records import CallKind, CallStatus, Message, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.filters import FilterFailed, excluded
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit import ADVANTAGES, CreditGroup, is_scoring
from bridle.trainer.credit.anchors import ANCHORS
from bridle.trainer.credit.privileged import CONTEXTS, Attempt
from bridle.trainer.filters import FILTERS

_REWARDS: Final = (1.0, 0.0, 0.5)
_CALLS: Final = 2
_PROMPT, _REPLY = 3, 2
"""Numbers of tokens that each call adds to its branch."""


def require_credit_and_filters(config: GrpoConfig, payload: Mapping[str, Any] | None) -> None:
    """Raise :class:`bridle.registry.PartFailed` for a part that fails on made-up sessions.

    The parts are the advantage, the anchor, the filters and the teacher's context. ``payload`` is
    that of a task of the run, or ``None`` if its tasks are not known.
    """
    group = _group(config, _Unknown() if payload is None else payload)
    trials = [_try_anchor, _try_advantage, _try_filters]  # some advantages ask for anchors
    for trial in [*trials, *([_try_context] if config.distillation.context else [])]:
        with suppress(Unjudged):
            trial(config, group)


class _Unknown(Mapping[str, Any]):
    """A payload of which nothing is known."""

    def __getitem__(self, key: str) -> NoReturn:
        raise Unjudged(key)

    def __iter__(self) -> Iterator[str]:
        raise Unjudged

    def __len__(self) -> int:
        raise Unjudged

    def __contains__(self, key: object) -> bool:
        raise Unjudged(key)

    def get(self, key: str, default: object = None) -> NoReturn:
        raise Unjudged(key)


def _try_advantage(config: GrpoConfig, group: CreditGroup) -> None:
    name = config.advantages.baseline
    credit = ADVANTAGES.tried(name, config.advantages.options, group)
    sizes = [[len(sample.token_ids) for sample in one.samples] for one in group.episodes]
    if not isinstance(credit, Sequence) or _sizes(credit) != sizes:
        raise ADVANTAGES.failed(
            name,
            f"returns {_shown(credit)} for three sessions of one sample: return, for each session, "
            "a list with an array float32[T] for each of its samples",
        )
    values = np.concatenate([np.asarray(part, np.float64) for parts in credit for part in parts])
    if np.isinf(values).any():
        raise ADVANTAGES.failed(name, "returns advantages that are infinite")
    if np.isnan(values).all():
        raise ADVANTAGES.failed(name, "returns NaN for every token, so that nothing is trained")


def _sizes(credit: Sequence[Any]) -> list[list[int]] | None:
    """Return the length of each array of numbers, or ``None`` if there is something else."""
    found = []
    for parts in credit:
        if not isinstance(parts, Sequence) or not all(map(_is_numbers, parts)):
            return None
        found.append([len(part) for part in parts])
    return found


def _is_numbers(part: object) -> bool:
    return isinstance(part, np.ndarray) and part.ndim == 1 and part.dtype.kind in "fiu"


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)}"
    if isinstance(value, list | tuple) and value:
        return f"a {type(value).__name__} that begins with {_shown(value[0])}"
    return f"{value!r:.80}"


def _try_anchor(config: GrpoConfig, group: CreditGroup) -> None:
    name = config.advantages.anchor
    for step in group.steps:
        key = ANCHORS.tried(name, config.advantages.options, group, step)
        if not isinstance(key, Hashable) or not _hashes(key):
            raise ANCHORS.failed(
                name, f"returns a {type(key).__name__}, which is no key: return text or a tuple"
            )


def _hashes(key: Hashable) -> bool:
    try:
        hash(key)
    except TypeError:  # a tuple with a list in it
        return False
    return True


def _try_filters(config: GrpoConfig, group: CreditGroup) -> None:
    for name in config.filters.extra:
        for episode in group.episodes:
            decision = FILTERS.tried(name, config.filters.options, episode)
            if isinstance(decision, bool | np.bool_):
                continue
            try:
                excluded(episode, name, decision)
            except FilterFailed as error:
                raise FILTERS.failed(name, f"fails: {error}") from error


def _try_context(config: GrpoConfig, group: CreditGroup) -> None:
    stated = config.distillation
    best, *others = (
        Attempt(one, float(reward))
        for one, reward in zip(group.episodes, group.rewards, strict=True)
    )
    given = CONTEXTS.tried(
        stated.context, stated.options, Attempt(best.episode, best.reward, tuple(others))
    )
    if given is not None and not isinstance(given, str | Sequence | np.ndarray):
        raise CONTEXTS.failed(
            stated.context, f"returns {given!r:.80}: return text, token ids or None"
        )


def _group(config: GrpoConfig, payload: Mapping[str, Any]) -> CreditGroup:
    episodes = [_episode(f"trial-{n}", one, payload) for n, one in enumerate(_REWARDS)]
    rewards = np.asarray(_REWARDS, np.float64)
    scores = is_scoring(ADVANTAGES.get(config.advantages.baseline))
    likelihoods = _likelihoods if scores else None
    return CreditGroup(episodes, rewards, config.advantages, {}, episodes, likelihoods)


def _likelihoods(asked: Sequence[tuple[bytes, str]]) -> list[NDArray[np.float32]]:
    return [np.full(max(1, len(text)), -1.0, np.float32) for _, text in asked]


def _episode(name: str, reward: float, payload: Mapping[str, Any]) -> Episode:
    size, calls = _PROMPT + _REPLY, [f"{name}/{number}" for number in range(_CALLS)]
    sampled = np.tile(np.arange(size) >= _PROMPT, _CALLS)
    numbers = np.repeat(np.arange(_CALLS), size)
    # The prompts of a group are equal, and its replies are not.
    ids = np.arange(size * _CALLS) + sampled * (1 + 100 * reward)
    sample = Sample(
        session_id=name,
        leaf_call_id=calls[-1],
        kind=CallKind.MAIN,
        role=None,
        token_ids=ids.astype(np.uint32),
        mask=sampled,
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, -1),
        calls=np.where(sampled, numbers, -1).astype(np.int32),
        call_ids=tuple(calls),
        weight=1.0,
    )
    count = int(sampled.sum())
    return Episode(
        SessionRecord(name, 0.0, group_id="trial", outcome="completed"),
        (sample,),
        (Reward(name, "reward", reward, 0.0, source=RewardSource.VERIFIER),),
        Conservation(captured=count, trained=count),
        tuple(_turn(call, number) for number, call in enumerate(calls)),
        payload,
    )


def _turn(call_id: str, number: int) -> Turn:
    return Turn(
        call_id,
        CallKind.MAIN,
        CallStatus.COMPLETE,
        finish_reason="stop",
        has_text=True,
        messages=(Message(role="user", content=f"question {number}"),),
        reply=Message(role="assistant", content=f"reply {number}"),
    )
