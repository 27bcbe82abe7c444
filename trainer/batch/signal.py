"""Figures of a step's sessions by which a collapse shows before the reward falls.

:mod:`bridle.diagnosis.findings.collapse` compares them over the steps of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.samples.sample import Episode
from bridle.store.reward import RewardKind, RewardSource
from bridle.trainer.credit.rewards import calls_in_order

_RUN: Final = 16
"""Number of tokens that must come again, in their order, to count as repeated."""
_FACTORS: Final = np.random.default_rng(7).integers(1 << 63, size=_RUN, dtype=np.uint64) | 1


def signal(
    episodes: Sequence[Episode],
    rewards: Mapping[int, float],
    groups: Iterable[Sequence[int]],
) -> dict[str, float]:
    """Return the figures of a step by name, without those that cannot be measured.

    ``rewards`` has the number of each session that is compared, by its index among ``episodes``;
    ``groups`` are the indices of those that are compared with each other.

    * ``signal/calls``: mean number of calls of a session
    * ``signal/reply_tokens``: mean number of sampled tokens of a call
    * ``signal/repeats``: share of sampled tokens at which 16 tokens end that its session had
      sampled before
    * ``signal/group_std``: mean standard deviation of rewards in a group
    * ``signal/top_group``: share of the variance within groups that the widest group has
    * ``signal/length_reward``: correlation of sampled tokens and reward within groups
    * ``judge/score``, ``judge/spread``: mean score of a rubric's judges, and their disagreement
    * ``judge/verifier``: mean of the verifier's own reward in the same sessions
    """
    own = [episodes[index] for index in rewards]
    calls = [len(calls_in_order(one)) for one in own]
    tokens = {index: float(episodes[index].conservation.captured) for index in rewards}
    given = [np.asarray([rewards[index] for index in each]) for each in groups]
    squares = [float(((each - each.mean()) ** 2).sum()) for each in given]
    found = {
        "signal/calls": _mean(calls),
        "signal/reply_tokens": _ratio(sum(tokens.values()), sum(calls)),
        "signal/repeats": _repeats(own),
        "signal/group_std": _mean([float(each.std()) for each in given if len(each) > 1]),
        "signal/top_group": _ratio(max(squares, default=0.0), sum(squares)),
        "signal/length_reward": _correlation(tokens, rewards, groups),
        **_judged(own),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _repeats(episodes: Iterable[Episode]) -> float:
    again = whole = 0
    for episode in episodes:
        hashes = list(_hashes(episode))
        if hashes:
            windows = np.concatenate(hashes)
            whole += len(windows)
            again += len(windows) - len(np.unique(windows))
    return _ratio(again, whole)


def _hashes(episode: Episode) -> Iterator[NDArray[np.uint64]]:
    """Yield a hash of each 16 tokens in a row of every sample, ``uint64[N]``."""
    for sample in episode.samples:
        ids = sample.token_ids[sample.mask].astype(np.uint64)
        if len(ids) >= _RUN:
            yield np.lib.stride_tricks.sliding_window_view(ids, _RUN) @ _FACTORS


def _correlation(
    tokens: Mapping[int, float], rewards: Mapping[int, float], groups: Iterable[Sequence[int]]
) -> float:
    lengths: list[NDArray[np.float64]] = []
    values: list[NDArray[np.float64]] = []
    for each in groups:
        for found, known in ((lengths, tokens), (values, rewards)):
            own = np.asarray([known[index] for index in each])
            found.append(own - own.mean())
    if not lengths:
        return math.nan
    x, y = np.concatenate(lengths), np.concatenate(values)
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return _ratio(float(x @ y), scale)


def _judged(episodes: Iterable[Episode]) -> dict[str, float]:
    scores: list[float] = []
    spreads: list[float] = []
    verified: list[float] = []
    for episode in episodes:
        whole = [one for one in episode.rewards if one.kind is RewardKind.SCORE and one.whole]
        judged = [one for one in whole if "judges" in (one.detail or {})]
        if not judged:
            continue
        scores.append(judged[-1].value)
        spreads.append(float(judged[-1].detail["spread"]))
        verified += [
            one.value
            for one in whole
            if one.source is RewardSource.VERIFIER and one.name == "reward"
        ]
    return {
        "judge/score": _mean(scores),
        "judge/spread": _mean(spreads),
        "judge/verifier": _mean(verified),
    }
