"""A turn critic: a small model of a session's state beside the policy, and GAE over its steps.

With ``r_t`` the reward of step ``t`` and the discount ``γ`` as in :mod:`.steps`, ``V`` the critic's
value and ``V(s_{T+1}) = 0``:

    ``δ_t = r_t + γ V(s_{t+1}) - V(s_t)``    ``Â_t = Σ_{k >= t} (γ λ)^(k - t) δ_k``

All tokens of a step get ``Â_t``, normalised over the steps of the group unless ``normalize`` is
off. The advantage is of turns and not of tokens: ArCHer (arXiv 2402.19446, section 3), VL-DAC
(arXiv 2508.04280), and StepPO (arXiv 2604.18401), which normalises over steps too.

``V(s) = w · x(s)`` has a vector ``x`` of length 1 whose entries are hashed: the state
(:mod:`.anchors`) with the role, and the words of the last observation with the role. So equal
states share a value from the first time on, and new observations get that of their words. After the
advantages of a group are taken, ``w`` is moved ``passes`` times to the targets ``Â_t + V(s_t)``, by
normalised least mean squares at ``rate``. A session therefore never counts in its own baseline. The
weights live as long as the run: a checkpoint holds them, ``width`` numbers at most.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np

from bridle.trainer.config import Count, Share
from bridle.trainer.credit.anchors import anchors
from bridle.trainer.credit.group import (
    Credit,
    CreditGroup,
    CreditStep,
    normalized,
    register_advantage,
    remembering,
    stepwise,
)
from bridle.trainer.credit.steps import rewards_in_order

Features = Mapping[str, float]
"""The entries of ``x`` that are not 0, by their key in the memory of the run."""
_WORDS: Final = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class CriticOptions:
    discount: Share = 1.0
    """The discount γ of a step's return, per step."""
    trace: Share = 0.95
    """The trace λ: with 1 the advantage is the return minus the value, without bias; with 0 it is
    the error of one step."""
    rate: Share = 0.5
    """The fraction of the distance to its target that a value moves in a pass."""
    passes: Count = 1
    """Number of passes over a group's steps."""
    width: Count = 4096
    """Number of hashed features, which bounds the critic's memory."""
    normalize: bool = True
    """Normalise the advantages over the steps of the group."""


_CRITIC: Final = CriticOptions()


@register_advantage("critic")
@stepwise
@remembering
def critic(group: CreditGroup, options: CriticOptions = _CRITIC) -> Credit:
    """Compare each step's outcome with what the critic expected, by GAE over steps."""
    places = [(step.episode, step.call_id) for step in group.steps]
    features = [
        _features(step, state, options.width)
        for step, state in zip(group.steps, anchors(group), strict=True)
    ]
    values = {
        place: _value(group.memory, entries)
        for place, entries in zip(places, features, strict=True)
    }
    advantages: dict[tuple[int, str], float] = {}
    for episode in range(len(group.episodes)):
        advantages |= _advantages(group, episode, values, options)
    targets = [advantages[place] + values[place] for place in places]
    for _ in range(options.passes):
        for target, entries in zip(targets, features, strict=True):
            error = target - _value(group.memory, entries)
            for key, entry in entries.items():
                group.memory[key] = group.memory.get(key, 0.0) + options.rate * error * entry
    found = np.asarray([advantages[place] for place in places], np.float64)
    if options.normalize:
        found = normalized(group, found, [None] * len(found))
    return group.by_step(found)


def _advantages(
    group: CreditGroup,
    episode: int,
    values: Mapping[tuple[int, str], float],
    options: CriticOptions,
) -> dict[tuple[int, str], float]:
    """Return the advantage of each step of one session, by episode and call."""
    calls = [step.call_id for step in group.steps_of(episode)]
    rewards = rewards_in_order(group, episode, calls, options.discount)
    found: dict[tuple[int, str], float] = {}
    following = advantage = 0.0
    for call_id, reward in zip(reversed(calls), reversed(rewards), strict=True):
        value = values[episode, call_id]
        error = reward + options.discount * following - value
        advantage = error + options.discount * options.trace * advantage
        following, found[episode, call_id] = value, advantage
    return found


def _features(step: CreditStep, state: Hashable, width: int) -> Features:
    """Return the entries of ``x`` for one step; their squares sum to 1.

    A state of its own has no entry, because it does not return.
    """
    seen = step.observation
    words = _WORDS.findall(seen) if isinstance(seen, str) else np.frombuffer(seen, np.uint32)
    parts: dict[str, float] = {}
    role = step.role or ""
    if type(state) is not object:
        _add(parts, f"state|{role}|{state!r}", 1.0, width)
    counts = dict[str, int]()
    for word in words:
        counts[str(word)] = counts.get(str(word), 0) + 1
    length = sqrt(sum(count * count for count in counts.values())) or 1.0
    for word, count in counts.items():
        _add(parts, f"word|{role}|{word}", count / length, width)
    whole = sqrt(sum(entry * entry for entry in parts.values())) or 1.0
    return {key: entry / whole for key, entry in parts.items()}


def _add(parts: dict[str, float], name: str, entry: float, width: int) -> None:
    key = f"critic|{zlib.crc32(name.encode()) % width}"
    parts[key] = parts.get(key, 0.0) + entry


def _value(memory: Mapping[str, float], features: Features) -> float:
    return sum(memory.get(key, 0.0) * entry for key, entry in features.items())
