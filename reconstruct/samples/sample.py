"""A recorded session as the trainer sees it: samples with masks, and where every token went.

A sample is a branch of the session's token tree. Over all samples of a session every sampled token
is trained at most once, and ``captured = trained + masked + dropped`` holds exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bridle.store.records import (
    CallKind,
    CallStatus,
    Logprobs,
    Reward,
    Sampler,
    SessionRecord,
    TokenIds,
)
from bridle.store.schema.accounts import Fate


@dataclass(frozen=True, slots=True)
class Sample:
    """One root-to-leaf branch, ready for training. All arrays have length ``T``."""

    session_id: str
    leaf_call_id: str
    """The call whose sampled tokens end the branch."""
    kind: CallKind
    role: str | None
    token_ids: TokenIds
    """``uint32[T]``"""
    mask: NDArray[np.bool_]
    """``bool[T]``: true where this sample trains the token; token ``t`` is predicted from
    ``token_ids[:t]``."""
    logprobs: Logprobs
    """``float32[T]``: the engine's behaviour logprob where a token was sampled and has one,
    else 0."""
    versions: NDArray[np.int64]
    """``int64[T]``: policy version that sampled the token, -1 where it was not sampled."""
    calls: NDArray[np.int32]
    """``int32[T]``: index into ``call_ids`` of the call that sampled the token, else -1."""
    call_ids: tuple[str, ...]
    """The branch's calls, root first."""
    weight: float
    """Share of its session's trained tokens under the rules: the weights of a session's samples sum
    to 1 (or all are 0). The trainer spreads a session's weight over the tokens that it trains."""
    samplers: tuple[Sampler | None, ...] = ()
    """Of each of ``call_ids``, what its tokens were drawn from; ``None``: not recorded."""
    roles: tuple[str | None, ...] = ()
    """Of each of ``call_ids``: the call's own role."""
    policies: tuple[str, ...] = ()
    """Of each of ``call_ids``: the name of the policy that was asked."""
    leaf_choice: int = 0
    """Which choice of the leaf call ends the branch."""


def sample_logprobs(logprobs: Logprobs) -> Logprobs:
    """``float32[T]``: recorded logprobs as a sample has them, with 0 for a missing one (NaN)."""
    missing = np.isnan(logprobs)
    return np.where(missing, np.float32(0), logprobs) if missing.any() else logprobs


@dataclass(frozen=True, slots=True)
class Conservation:
    """Where a session's sampled tokens went."""

    captured: int
    trained: int
    masked: Mapping[str, int] = field(default_factory=dict)
    """Kept in a sample as context, not trained: tokens by reason."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """In no sample: tokens by reason."""

    @property
    def untrained(self) -> Counter[str]:
        """Masked and dropped tokens by reason."""
        return Counter(self.masked) + Counter(self.dropped)

    @property
    def balanced(self) -> bool:
        return self.captured == self.trained + self.untrained.total()

    def by_fate(self, kept: Fate) -> dict[tuple[str, str], int]:
        """Tokens by fate and reason; ``kept`` names what is not masked or dropped: ``TRAINABLE``
        where only rules have judged."""
        counted = {kept: self.trained}
        counted |= {Fate("masked", reason): tokens for reason, tokens in self.masked.items()}
        counted |= {Fate("dropped", reason): tokens for reason, tokens in self.dropped.items()}
        return {fate: tokens for fate, tokens in counted.items() if tokens}

    def __add__(self, other: Conservation) -> Conservation:
        """The account of two sessions."""
        return Conservation(
            self.captured + other.captured,
            self.trained + other.trained,
            dict(Counter(self.masked) + Counter(other.masked)),
            dict(Counter(self.dropped) + Counter(other.dropped)),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """What a call of a session came to, as filters judge it."""

    call_id: str
    kind: CallKind
    status: CallStatus
    reason: str | None = None
    """Why a call failed: ``budget``, ``context_overflow`` or a fault of the engine."""
    finish_reason: str | None = None
    tool_calls: int = 0
    has_text: bool = False
    """Whether the reply says something besides reasoning and tool calls."""
    parse_failed: bool = False
    """Whether it has a tool call that cannot be read."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A session as the trainer takes it: its samples, its rewards, its account of tokens."""

    session: SessionRecord
    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]
    conservation: Conservation
    turns: tuple[Turn, ...] = ()
    """The agent's calls in the order of their start; those on the side are left out."""
