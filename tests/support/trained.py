"""Sessions as a training run leaves them: all of their tokens trained, each with its scores."""

from __future__ import annotations

import numpy as np

from bridle.store.reading.queries import Reader
from bridle.store.trained import SessionFates, SpanScores

GAP = np.float32(0.0625)
"""The trainer's logprobs are lower than the engine's by this much."""
ENTROPY = np.float32(0.75)


def trained(reader: Reader, session_id: str, run_id: str, *, step: int = 0) -> SessionFates:
    """Return the account of a step that has trained every sampled token of a session."""
    scores = tuple(
        SpanScores(
            call.id,
            choice,
            step,
            sampled.logprobs - GAP,
            np.full(len(sampled.token_ids), ENTROPY, np.float32),
        )
        for call in reader.calls(session_id)
        for choice, sampled in enumerate(reader.sampled(call.id))
    )
    tokens = sum(len(each.logprobs) for each in scores)
    return SessionFates(
        session_id, run_id, {("trained", ""): tokens}, step, step + 1, 1.0 + step, scores
    )
