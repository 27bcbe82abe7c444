"""A recorded session in the form that the trainer takes: samples with masks, and a token account.

A sample is a branch of the session's token tree. Over all samples of a session every sampled token
is trained at most once, and ``captured = trained + masked + dropped`` holds exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from bridle.store.reading.conversation import ReplyId
from bridle.store.records import (
    CallKind,
    CallStatus,
    Logprobs,
    Message,
    Sampler,
    SessionRecord,
    TokenIds,
)
from bridle.store.reward import Reward
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
    """The sample's share of its session's trained tokens under the rules. The weights of a
    session's samples sum to 1 (or all are 0). The trainer spreads a session's weight over the
    tokens that it trains."""
    samplers: tuple[Sampler | None, ...] = ()
    """The sampler of each of ``call_ids``; ``None`` if it was not recorded."""
    roles: tuple[str | None, ...] = ()
    """The role of each of ``call_ids``."""
    policies: tuple[str, ...] = ()
    """The name of the policy that was requested in each of ``call_ids``."""
    choices: tuple[int, ...] = ()
    """The choice of each of ``call_ids``; empty if each is the first."""
    kept: KeptSets | None = None
    """The ids that each token was drawn from; ``None`` if the engine reported none."""
    routed_experts: NDArray[np.int16] | None = None
    """``int16[T, layers, top_k]``: the experts behind token ``t``, which the engine chose at the
    position before it; -1 where they are not known. ``None`` if the engine reported none."""
    trained_logprobs: Logprobs | None = None
    """``float32[T]``: the trainer's logprob of each token before the last step that trained it; NaN
    where none did. ``None`` if no token has one, or none was read
    (:func:`bridle.reconstruct.samples.scores.with_scores`)."""
    entropies: Logprobs | None = None
    """``float32[T]``: the entropy of the distribution of these tokens, in nats."""

    @property
    def replies(self) -> tuple[ReplyId, ...]:
        """The replies on the branch, in the order of ``call_ids``."""
        choices = self.choices or (0,) * len(self.call_ids)
        return tuple(map(ReplyId, self.call_ids, choices))

    @property
    def leaf_choice(self) -> int:
        """The choice of the leaf call that ends the branch."""
        return self.choices[-1] if self.choices else 0


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The ids that each of a sample's ``T`` tokens was drawn from."""

    ends: NDArray[np.int64]
    """``int64[T]``: the index in ``ids`` after the token's last one. Token ``t`` was drawn from
    ``ids[ends[t - 1] : ends[t]]``; nothing is recorded for it if these are none."""
    ids: TokenIds
    """``uint32[ends[-1]]``"""

    def of_token(self, token: int) -> TokenIds:
        return self.ids[self.ends[token - 1] if token else 0 : self.ends[token]]


def sample_logprobs(logprobs: Logprobs) -> Logprobs:
    """Return recorded logprobs (``float32[T]``) in the form of a sample.

    A missing logprob (NaN) is 0 there.
    """
    missing = np.isnan(logprobs)
    return np.where(missing, np.float32(0), logprobs) if missing.any() else logprobs


@dataclass(frozen=True, slots=True)
class Conservation:
    """The account of a session's sampled tokens."""

    captured: int
    trained: int
    masked: Mapping[str, int] = field(default_factory=dict)
    """Tokens that a sample keeps as untrained context, by reason."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Tokens in no sample, by reason."""

    @property
    def untrained(self) -> Counter[str]:
        """Masked and dropped tokens by reason."""
        return Counter(self.masked) + Counter(self.dropped)

    @property
    def balanced(self) -> bool:
        return self.captured == self.trained + self.untrained.total()

    def by_fate(self, kept: Fate) -> dict[tuple[str, str], int]:
        """Return tokens by fate and reason.

        ``kept`` is the fate of tokens that are neither masked nor dropped: ``TRAINABLE`` if only
        rules have judged.
        """
        counted = {kept: self.trained}
        counted |= {Fate("masked", reason): tokens for reason, tokens in self.masked.items()}
        counted |= {Fate("dropped", reason): tokens for reason, tokens in self.dropped.items()}
        return {fate: tokens for fate, tokens in counted.items() if tokens}


@dataclass(frozen=True, slots=True)
class Turn:
    """A call of a session: its text and its result, for filters, anchors and estimators."""

    call_id: str
    kind: CallKind
    status: CallStatus
    reason: str | None = None
    """The reason for which a call failed: ``budget``, ``context_overflow`` or a fault of the
    engine."""
    finish_reason: str | None = None
    tool_calls: int = 0
    has_text: bool = False
    """True if the reply has text besides reasoning and tool calls."""
    parse_failed: bool = False
    """True if it has a tool call that cannot be parsed."""
    role: str | None = None
    messages: tuple[Message, ...] = ()
    """The messages that the request added to the call that it continues."""
    reply: Message | None = None
    """The first reply."""

    @property
    def observation(self) -> str | None:
        """The text of the messages after the last reply; ``None`` if no messages are recorded."""
        if not self.messages:
            return None
        begins = max(
            (at + 1 for at, one in enumerate(self.messages) if one.role == "assistant"), default=0
        )
        seen = [(one.role, one.content) for one in self.messages[begins:]]
        return orjson.dumps(seen).decode()


@dataclass(frozen=True, slots=True)
class Episode:
    """A session in the form that the trainer takes: its samples, rewards and token account."""

    session: SessionRecord
    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]
    conservation: Conservation
    turns: tuple[Turn, ...] = ()
    """The agent's calls in the order of their start; side calls are left out."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """The data of the session's task, such as the expected answer; empty if it has none."""
