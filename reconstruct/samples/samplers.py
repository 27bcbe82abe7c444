"""The samplers at which the trainer can score tokens, and the reasons against the others.

The trainer computes temperature, min-p, top-k and top-p again, with its own logits. It has neither
the counts of penalties nor the state of a grammar.
"""

from __future__ import annotations

from typing import Final

from bridle.store.records import Sampler

_PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_TRUNCATION: Final = ("temperature", "top_p", "top_k", "min_p")
GRAMMAR: Final = "sampler_grammar"
"""The reason for a token that a grammar constrained."""
GREEDY_BELOW: Final = 1e-5
"""The temperature below which engines sample the likeliest token."""


def unscored(sampler: Sampler | None) -> str | None:
    """Return the reason why no token of ``sampler`` can be trained, or ``None`` if some can.

    Training is against the distribution that they were drawn from. Where a grammar began within the
    reply, the tokens before it can be trained (:attr:`Sampler.unconstrained`).
    """
    if sampler is None:
        return "sampler_not_recorded"
    if sampler.grammar and not sampler.unconstrained:
        return GRAMMAR
    if sampler.others:
        return f"sampler_{sampler.others[0]}"
    if any(getattr(sampler, name) is None for name in (*_TRUNCATION, *_PENALTIES)):
        return "sampler_unknown"
    plain = Sampler()
    if any(getattr(sampler, name) != getattr(plain, name) for name in _PENALTIES):
        return "sampler_penalty"
    if sampler.temperature is not None and sampler.temperature < GREEDY_BELOW:
        return "sampler_greedy"
    changed = any(getattr(sampler, name) != getattr(plain, name) for name in _TRUNCATION)
    if changed and sampler.logprobs != "processed":
        # The recorded logprob is then not of what the token was drawn from.
        return "sampler_logprobs_raw"
    return None
