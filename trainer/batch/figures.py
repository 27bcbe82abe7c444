"""Figures of a step's sessions by their parts: tasks, roles, names, lengths, success, advantages.

The names are declared in :mod:`bridle.store.diagnostics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bridle.reconstruct.evaluation import pass_at_k
from bridle.reconstruct.rewards import Numbers
from bridle.reconstruct.samples.sample import Episode
from bridle.store.reward import RewardKind
from bridle.trainer.batch.filters import TokenAccount
from bridle.trainer.credit.rewards import calls_in_order

SUCCESS: Final = 1.0
"""The reward from which on a session is a success, as an evaluation has it by default."""
_MOST: Final = 16
"""Largest number of tasks, and of names, that have a figure each."""


def figures(
    episodes: Sequence[Episode],
    rewards: Mapping[int, float],
    groups: Iterable[Sequence[int]],
    numbers: Sequence[Numbers],
    accounts: Sequence[TokenAccount],
) -> dict[str, float]:
    """Return the figures of a step's sessions by name, without those that cannot be measured.

    ``rewards`` has the number of each session that is compared, by its index among ``episodes``;
    ``groups`` are the indices of those that are compared with each other. ``numbers`` and
    ``accounts`` are those of each of ``episodes``.
    """
    found = {
        **_by_part(episodes, rewards, numbers),
        "reward/whole": _from_start(episodes, rewards),
        **_pass_at(rewards, groups),
        **_lengths(episodes, rewards),
        "slots/useful": _useful(episodes, accounts),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def advantages(credit: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """Return the quantiles of the trained tokens' advantages, one array for each sample."""
    values = np.concatenate([np.zeros(0, np.float32), *credit])
    if not len(values):
        return {}
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return {
        "advantage/min": float(values.min()),
        "advantage/p05": float(low),
        "advantage/p50": float(middle),
        "advantage/p95": float(high),
        "advantage/max": float(values.max()),
        "advantage/positive": float((values > 0).mean()),
    }


def _by_part(
    episodes: Sequence[Episode], rewards: Mapping[int, float], numbers: Sequence[Numbers]
) -> dict[str, float]:
    tasks: dict[str, list[float]] = {}
    roles: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    turns: dict[str, list[float]] = {}
    for index, reward in rewards.items():
        episode = episodes[index]
        if episode.session.task_id is not None:
            tasks.setdefault(episode.session.task_id, []).append(reward)
        for role in {turn.role for turn in episode.turns if turn.role is not None}:
            roles.setdefault(role, []).append(numbers[index].roles.get(role, reward))
        for given in episode.rewards:
            if given.kind is RewardKind.SCORE and given.whole:
                names.setdefault(given.name, []).append(given.value)
        turns.setdefault(_range(len(calls_in_order(episode))), []).append(reward)
    parts = {
        "task": tasks if len(tasks) <= _MOST else {},
        "role": roles,
        "name": dict(sorted(names.items())[:_MOST]),
        "turns": turns,
    }
    return {
        f"reward/{part}/{name}": float(np.mean(values))
        for part, of in parts.items()
        for name, values in of.items()
    }


def _from_start(episodes: Sequence[Episode], rewards: Mapping[int, float]) -> float:
    """Return the mean reward of the sessions that re-enter none, if others do."""
    whole = [
        reward
        for index, reward in rewards.items()
        if episodes[index].session.origin_session_id is None
    ]
    return float(np.mean(whole)) if 0 < len(whole) < len(rewards) else math.nan


def _range(calls: int) -> str:
    """Return the range of powers of two that a number of calls is in, such as ``4-7``."""
    low = 1 << max(0, calls.bit_length() - 1) if calls else 0
    return str(low) if low < 2 else f"{low}-{2 * low - 1}"


def _pass_at(rewards: Mapping[int, float], groups: Iterable[Sequence[int]]) -> dict[str, float]:
    """Return the chance of a success among k sessions, for the powers of two that groups have."""
    counted = [(len(each), sum(rewards[one] >= SUCCESS for one in each)) for each in groups]
    fewest = min((size for size, _ in counted), default=0)
    ks = [1 << power for power in range(fewest.bit_length())]
    return {
        f"pass/at_{k}": float(np.mean([pass_at_k(n, won, k) for n, won in counted])) for k in ks
    }


def _lengths(episodes: Sequence[Episode], rewards: Mapping[int, float]) -> dict[str, float]:
    tokens, replies = {True: 0, False: 0}, {True: 0, False: 0}
    for index, reward in rewards.items():
        solved = reward >= SUCCESS
        tokens[solved] += episodes[index].conservation.captured
        replies[solved] += len(calls_in_order(episodes[index]))
    turns = [turn for index in rewards for turn in episodes[index].turns]
    acting = [turn.parse_failed for turn in turns if turn.tool_calls or turn.parse_failed]
    return {
        "length/solved": _share(tokens[True], replies[True]),
        "length/failed": _share(tokens[False], replies[False]),
        "length/cut": _share(sum(turn.finish_reason == "length" for turn in turns), len(turns)),
        "tools/failed": _share(sum(acting), len(acting)),
    }


def _useful(episodes: Sequence[Episode], accounts: Sequence[TokenAccount]) -> float:
    useful = spent = 0.0
    for episode, account in zip(episodes, accounts, strict=True):
        ended, begun = episode.session.sealed_at, episode.session.created_at
        if ended is None or ended <= begun:
            continue
        spent += ended - begun
        if account.captured:
            useful += (ended - begun) * account.trained / account.captured
    return _share(useful, spent)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
