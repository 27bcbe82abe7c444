"""How much each trained token weighs: the loss of a batch is ``Σ_t w_t ℓ_t``.

For a batch of ``S`` sessions and ``N`` trained tokens, with ``n_b`` trained tokens in branch ``b``
and ``share_b`` the branch's share of its session (the shares of a session's branches that train
something sum to 1):

============  ========================  ===========================================================
``session``   ``share_b / (n_b S)``     A session's tokens weigh ``1 / S`` together, however many
                                        tokens or branches it has. GRPO's mean over sequences
                                        (arXiv 2402.03300) with the session as the sequence.
``token``     ``1 / N``                 Token-mean (DAPO, arXiv 2503.14476). A session weighs
                                        ``n_s / N``: more with its length, not with its branches,
                                        because every sampled token is trained in one branch only.
``constant``  ``1 / (L S)``             Dr. GRPO (arXiv 2503.20783, §3.2): a session weighs
                                        ``n_s / (L S)`` with a constant L, free of length bias.
============  ========================  ===========================================================

When a branch's share is ``n_b / n_s`` (its part of the session's trained tokens), ``session`` is
the token-mean of each session, averaged over sessions. Weights are made for the whole batch of one
optimizer update, so cutting it into packs changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridle.trainer.config import Weighting


def branch_token_weights(
    tokens: NDArray[np.int64],
    shares: NDArray[np.float64],
    sessions: NDArray[np.int64],
    weighting: Weighting,
    constant_tokens: int = 1,
) -> NDArray[np.float64]:
    """Weight of one trained token of each of ``B`` branches, ``float64[B]``.

    ``tokens``: trained tokens per branch; ``shares``: its share as recorded (rescaled here over the
    branches of a session that train something); ``sessions``: which session it belongs to. All
    have length ``B``. Branches without trained tokens get 0, and sessions without any do not count.
    """
    active = (tokens > 0) & (shares > 0)
    count = np.where(active, tokens, 0)
    session_total = len(np.unique(sessions[active]))
    if session_total == 0:
        return np.zeros(len(tokens), dtype=np.float64)
    match weighting:
        case "token":
            weights = np.full(len(tokens), 1.0 / count.sum())
        case "constant":
            weights = np.full(len(tokens), 1.0 / (constant_tokens * session_total))
        case "session":
            mass = np.bincount(sessions, weights=np.where(active, shares, 0.0))
            share = shares / np.where(mass > 0, mass, 1.0)[sessions]
            weights = share / (np.maximum(count, 1) * session_total)
    return np.where(active, weights, 0.0)
