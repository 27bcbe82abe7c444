"""Sampling of tokens from logits, for a batch of sequences with settings of their own.

Each sequence draws one uniform number per token from its own generator and inverts its cumulative
distribution with it, so a seeded sequence does not depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bridle.engine.embedded.truncation import Truncation
from bridle.engine.serve.backend import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence's share of a sampling batch."""

    sampling: SamplingParams
    uniform: float
    """A number in [0, 1); not used when greedy."""
    token_ids: Sequence[int]
    """Prompt ids, then sampled ids; read only if a penalty is set."""
    prompt_length: int


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample one token per row of ``logits`` (``float[R, V]``).

    The logprobs are of the distribution that is drawn from, after penalties, temperature and
    truncation; of a greedy row they are after penalties only.
    """
    settings = [row.sampling for row in rows]
    scores = _processed(_penalised(logits.float(), rows), settings)
    logprobs = scores.log_softmax(-1)
    greedy = all(row.sampling.greedy for row in rows)
    chosen = scores.argmax(-1) if greedy else _drawn(scores, rows)
    values = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    top = _likeliest(logprobs, [one.top_logprobs for one in settings])
    kept = [_kept(line, one) for line, one in zip(scores, settings, strict=True)]
    return list(map(SampledToken, chosen.tolist(), values, top, kept))


def _kept(scores: torch.Tensor, sampling: SamplingParams) -> tuple[int, ...]:
    """Return the ids that may be drawn, in their order, or none if truncation is off."""
    if sampling.greedy or not sampling.truncates:
        return ()
    return tuple((scores > -torch.inf).nonzero()[:, 0].tolist())


def _drawn(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    device = scores.device
    cumulative = scores.double().softmax(-1).cumsum(-1)
    uniforms = torch.tensor([row.uniform for row in rows], dtype=torch.double, device=device)
    # The first id whose cumulative probability exceeds the target has probability of its own.
    targets = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    greedy = torch.tensor([row.sampling.greedy for row in rows], device=device)
    return torch.where(greedy, scores.argmax(-1), drawn)


def _processed(scores: torch.Tensor, settings: Sequence[SamplingParams]) -> torch.Tensor:
    """Return ``scores`` over the temperature of each row, and ``-inf`` where it may not draw."""
    changed = [
        index
        for index, one in enumerate(settings)
        if not one.greedy and (one.temperature != 1.0 or one.truncates)
    ]
    if not changed:
        return scores
    chosen = [settings[index] for index in changed]
    values = [(one.temperature, one.top_p, one.top_k, one.min_p) for one in chosen]
    truncation = Truncation.of(torch.tensor(values, dtype=torch.double, device=scores.device))
    scores = scores.clone()
    scores[changed] = truncation.apply(scores[changed])
    return scores


def _penalised(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply presence and frequency penalties to sampled ids, repetition also to prompt ids."""
    scores = logits
    for index, row in enumerate(rows):
        sampling = row.sampling
        if (
            not sampling.presence_penalty
            and not sampling.frequency_penalty
            and sampling.repetition_penalty == 1.0
        ):
            continue
        if scores is logits:
            scores = logits.clone()
        line = scores[index]
        seen = torch.tensor(sorted(set(row.token_ids)), device=line.device)
        values = line[seen]
        penalty = sampling.repetition_penalty
        line[seen] = torch.where(values > 0, values / penalty, values * penalty)
        sampled = torch.tensor(
            row.token_ids[row.prompt_length :], dtype=torch.long, device=line.device
        )
        counts = torch.bincount(sampled, minlength=len(line))
        line -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    return scores


def _likeliest(
    logprobs: torch.Tensor, counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    most = max(counts, default=0)
    if not most:
        return [()] * len(counts)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    return [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for row_ids, row_values, count in zip(ids.tolist(), values.tolist(), counts, strict=True)
    ]
