"""The records that training leaves of a session: the fates of its tokens, and their scores.

A training run writes both once the step that took the session is durable. The fates are counts for
every sampled token; the scores are two numbers for each trained one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from bridle.store.declaration import Codec, Fact
from bridle.store.encoding.packing import pack_logprobs, unpack_logprobs
from bridle.store.records import Logprobs

_FLOATS: Final = Codec(pack_logprobs, unpack_logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class SpanScores:
    """The trainer's scores of the tokens that one choice of a call sampled.

    Both arrays are ``float32[T]`` and may end before the span does. NaN stands for a token that was
    not trained.
    """

    call_id: Annotated[
        str,
        Fact(
            "The id of the call that sampled the tokens", size=64, key=True, references="calls.id"
        ),
    ]
    choice: Annotated[int, Fact("The index of the choice", key=True)]
    version: Annotated[
        int, Fact("The policy version whose weights gave the scores, before the step", big=True)
    ]
    logprobs: Annotated[
        Logprobs,
        Fact("The trainer's logprob of each token; NaN: not trained", codec=_FLOATS),
    ]
    entropies: Annotated[
        Logprobs,
        Fact("The entropy of the distribution of each token, in nats", codec=_FLOATS),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedSpan(SpanScores):
    """The scores of a span in the last step that trained it: a row of ``trained_spans``."""

    run_id: Annotated[str, Fact("The training run", size=64)]
    step: Annotated[int, Fact("The step, from 0")]


@dataclass(frozen=True, slots=True)
class SessionFates:
    """A training run's account of a session's sampled tokens.

    A later account of the same session by the same run replaces the earlier one.
    """

    session_id: str
    run_id: str
    tokens: Mapping[tuple[str, str], int]
    """Number of tokens by fate (``trained``, ``masked``, ``dropped``) and reason."""
    step: int
    """The step that took the session, from 0."""
    version: int | None
    """Policy version after the step; ``None`` where weights have no number."""
    at: float
    scores: tuple[SpanScores, ...] = ()
    """The scores of the trained spans, if the run keeps them."""
