"""Checks of recorded calls: contradictions within a reply, and checksums of spans.

A record that contradicts itself is kept, and never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from bridle.store.call import CallEnded
from bridle.store.records import (
    MISSING_LOGPROB,
    CallStatus,
    Choice,
    KeptTokens,
    Span,
    TokenIds,
    VersionRun,
)

_ANY_ID: Final = 1 << 32

_highest_id = np.maximum.reduce
_lowest, _highest = np.fmin.reduce, np.fmax.reduce  # a token without a logprob has NaN

_ROUNDING: Final = 1e-6
"""The amount by which a logprob may exceed 0, because engines compute in float32."""


def has_ids(ended: CallEnded) -> bool:
    """Return whether the engine sent any token ids.

    Without them there is nothing to check or train.
    """
    return ended.prompt_token_ids is not None or any([len(c.token_ids) for c in ended.choices])


def contradiction(ended: CallEnded, vocabulary: int | None = None) -> str | None:
    """Return the reason why this call must be quarantined: a snake_case word, a colon and a detail.

    Return ``None`` if its ids, logprobs, policy versions and usage agree, or if it has no ids at
    all (because its upstream sends none). Usage is compared for complete calls only, because a call
    that was cut has none, or a stale one. ``vocabulary`` is the number of token ids, if it is
    known.
    """
    if not has_ids(ended):
        return None
    if ended.prompt_token_ids is None:
        return "prompt_ids_missing: the engine gave sampled ids without the prompt's"
    if not len(ended.prompt_token_ids):
        return "prompt_empty: the engine gave no prompt ids"
    known = _ANY_ID if vocabulary is None else vocabulary
    if (highest := _highest_id(ended.prompt_token_ids)) >= known:
        return f"id_beyond_vocabulary: {highest} of {known} ids (prompt)"
    for index, choice in enumerate(ended.choices):
        if (reason := _choice_contradiction(choice, known)) is not None:
            return f"{reason} (choice {index})"
    return _usage_contradiction(ended) if ended.status is CallStatus.COMPLETE else None


def _choice_contradiction(choice: Choice, vocabulary: int) -> str | None:
    sampled, scored = len(choice.token_ids), len(choice.logprobs)
    if sampled != scored:
        return f"logprobs_mismatch: {sampled} ids, {scored} logprobs"
    if not sampled:
        return None
    if (highest_id := _highest_id(choice.token_ids)) >= vocabulary:
        return f"id_beyond_vocabulary: {highest_id} of {vocabulary} ids"
    lowest, highest = float(_lowest(choice.logprobs)), float(_highest(choice.logprobs))
    if math.isinf(lowest) or math.isinf(highest):
        return "logprobs_not_finite"
    if lowest <= MISSING_LOGPROB:
        return f"logprobs_missing: {lowest:g} stands for no logprob; NaN does in a record"
    if highest > _ROUNDING:
        return f"logprobs_positive: {highest:g}"
    if choice.kept is not None and (reason := _kept_contradiction(choice, choice.kept)) is not None:
        return reason
    if choice.routed_experts is not None and len(choice.routed_experts) != sampled:
        return f"experts_mismatch: {sampled} ids, experts of {len(choice.routed_experts)}"
    runs = choice.versions
    if not runs or runs[0].start != 0:
        return "version_missing: a sampled token has no policy version"
    return _runs_contradiction(runs, sampled) if len(runs) > 1 else None


def _kept_contradiction(choice: Choice, kept: KeptTokens) -> str | None:
    sampled = len(choice.token_ids)
    if len(kept.counts) != sampled:
        return f"kept_mismatch: {sampled} ids, sets of {len(kept.counts)}"
    drawn = np.repeat(choice.token_ids, kept.counts) == kept.ids
    owners = np.repeat(np.arange(sampled), kept.counts)
    inside = np.zeros(sampled, np.bool_)
    inside[owners[drawn]] = True
    if not (inside | (kept.counts == 0)).all():
        return "kept_without_token: a sampled token is not in the set that it was drawn from"
    return None


def _runs_contradiction(runs: Sequence[VersionRun], sampled: int) -> str | None:
    starts = [run.start for run in runs]
    if sorted(set(starts)) != starts or starts[-1] >= sampled:
        return "version_runs_malformed"
    versions = [run.version for run in runs]
    if sorted(versions) != versions:
        return "version_went_back"
    return None


def _usage_contradiction(ended: CallEnded) -> str | None:
    sampled = sum([len(choice.token_ids) for choice in ended.choices])
    reported = ended.usage.get("completion_tokens")
    if reported is None:
        return "usage_missing"
    if reported != sampled:
        return f"usage_mismatch: {sampled} sampled ids, usage says {reported}"
    prompt = 0 if ended.prompt_token_ids is None else len(ended.prompt_token_ids)
    reported = ended.usage.get("prompt_tokens")
    if reported is None:
        return "usage_missing"
    if reported != prompt:
        return f"prompt_mismatch: {prompt} prompt ids, usage says {reported}"
    return None


def span_checksum(span: Span) -> bytes:
    """Return 8 bytes over all of a span's data: its place, tokens and what is known of them."""
    place = (span.id, span.session_id, span.call_id, span.parent_id, span.start, span.kind.value)
    versions = [(run.start, run.version) for run in span.versions]
    head = f"{place}{versions}{len(span.token_ids)}".encode()
    ids = span.token_ids.astype("<u4", copy=False).tobytes()
    logprobs = b"" if span.logprobs is None else span.logprobs.astype("<f4", copy=False).tobytes()
    parts = [head, ids, logprobs]
    if span.kept is not None:
        parts += [one.astype("<u4", copy=False).tobytes() for one in _sets(span.kept)]
    if span.routed_experts is not None:
        parts += [str(span.routed_experts.shape).encode(), span.routed_experts.tobytes()]
    return blake2b(b"".join(parts), digest_size=8).digest()


def _sets(kept: KeptTokens) -> tuple[TokenIds, TokenIds]:
    return kept.counts, kept.ids
