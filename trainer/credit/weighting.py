"""Weights of trained tokens: the loss of a batch is ``Σ_t w_t ℓ_t``.

For a batch of ``S`` sessions that train something, ``N`` trained tokens, and ``n_s`` of them in
session ``s``, in whichever of its branches:

============  ================  ===================================================================
``session``   ``1 / (n_s S)``   A session weighs ``1 / S``, however many tokens or branches it has,
                                and its tokens weigh the same. GRPO's mean over sequences (arXiv
                                2402.03300) with the session as the sequence.
``token``     ``1 / N``         Token-mean (DAPO, arXiv 2503.14476). A session weighs ``n_s / N``:
                                more with its length, not with its branches, because every sampled
                                token is trained in one branch only.
``constant``  ``1 / (L S)``     Dr. GRPO (arXiv 2503.20783, §3.2): a session weighs ``n_s / (L S)``
                                with a constant L, free of length bias.
============  ================  ===================================================================

Trained tokens are those that are left after all masks: masks of the rules, of stale versions, of
other policies and of estimators. Weights are made for the whole batch of one optimizer
update, so cutting it into packs changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridle.trainer.config import Weighting


def branch_token_weights(
    tokens: NDArray[np.int64],
    sessions: NDArray[np.int64],
    weighting: Weighting,
    constant_tokens: int = 1,
) -> NDArray[np.float64]:
    """Return the weight of one trained token of each of ``B`` branches, ``float64[B]``.

    ``tokens`` is the number of trained tokens per branch; ``sessions`` is the session that the
    branch belongs to, counted from 0. Both have length ``B``. Branches without trained tokens get
    0, and sessions without any do not count.
    """
    active = tokens > 0
    session_total = len(np.unique(sessions[active]))
    if session_total == 0:
        return np.zeros(len(tokens), dtype=np.float64)
    match weighting:
        case "token":
            weights = np.full(len(tokens), 1.0 / tokens.sum())
        case "constant":
            weights = np.full(len(tokens), 1.0 / (constant_tokens * session_total))
        case "session":
            of_session = np.bincount(sessions, weights=tokens)[sessions]
            weights = 1.0 / (np.maximum(of_session, 1) * session_total)
    return np.where(active, weights, 0.0)
