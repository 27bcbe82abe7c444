"""Samples as Arrow rows: one schema for files, the feed and Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from bridle.reconstruct.arrow import needs_arrow
from bridle.reconstruct.samples.sample import Sample
from bridle.store.records import SessionRecord

if TYPE_CHECKING:
    import pyarrow as pa

_SESSION_COLUMNS: Final = (
    ("run_id", "string"),
    ("task_suite", "string"),
    ("task_split", "string"),
    ("task_id", "string"),
    ("group_id", "string"),
    ("harness", "string"),
)
SAMPLE_COLUMNS: Final = (
    ("session_id", "string"),
    ("leaf_call_id", "string"),
    ("leaf_choice", "int32"),
    ("kind", "string"),
    ("role", "string"),
    ("weight", "double"),
    ("token_ids", "list<uint32>"),
    ("mask", "list<bool>"),
    ("logprobs", "list<float32>"),
    ("versions", "list<int64>"),
    ("calls", "list<int32>"),
    ("call_ids", "list<string>"),
    ("choices", "list<int32>"),
    ("roles", "list<string>"),
    ("policies", "list<string>"),
    ("samplers", "list<string>"),
)
"""The fields of a sample, each with the name of its Arrow type."""
FACT_COLUMNS: Final = (
    ("kept_counts", "list<uint32>"),
    ("kept_ids", "list<uint32>"),
    ("routed_experts", "list<int16>"),
    ("routed_shape", "list<int32>"),
    ("trained_logprobs", "list<float32>"),
    ("entropies", "list<float32>"),
)
"""Further fields of a sample: what engines report of its tokens, and the trainer's scores of them.

``kept_ids`` are the ids that the tokens were drawn from, one token's after another's.
``routed_experts`` has the shape ``routed_shape``. A value is NULL if nothing is recorded."""


def sample_schema(reward_names: Sequence[str], *, facts: bool = False) -> pa.Schema:
    """Return the schema of a row per sample.

    It has the sample's fields, its session's, and a float64 column ``reward.NAME`` for each name;
    with ``facts`` also :data:`FACT_COLUMNS`.
    Raises :class:`bridle.reconstruct.arrow.ArrowMissing` without pyarrow.
    """
    with needs_arrow():
        import pyarrow as pa

    def column(name: str, kind: str) -> pa.Field:
        inner = kind.removeprefix("list<").removesuffix(">")
        plain = pa.type_for_alias(inner)
        return pa.field(name, plain if inner == kind else pa.list_(plain))

    rewards = ((f"reward.{name}", "double") for name in reward_names)
    own = (*SAMPLE_COLUMNS, *(FACT_COLUMNS if facts else ()))
    return pa.schema([column(*each) for each in (*own, *_SESSION_COLUMNS, *rewards)])


def sample_row(
    session: SessionRecord,
    sample: Sample,
    names: Sequence[str],
    rewards: Mapping[str, float],
    *,
    facts: bool = False,
) -> dict[str, Any]:
    """Return one row of :func:`sample_schema`."""
    row = sample_values(sample, facts=facts)
    row["samplers"] = [
        None if one is None else msgspec.json.encode(one).decode() for one in sample.samplers
    ]
    row |= {name: getattr(session, name) for name, _ in _SESSION_COLUMNS}
    return row | {f"reward.{name}": rewards.get(name) for name in names}


def sample_values(sample: Sample, *, facts: bool = False) -> dict[str, Any]:
    """Return the values of :data:`SAMPLE_COLUMNS`, and with ``facts`` of :data:`FACT_COLUMNS`."""
    values = {name: getattr(sample, name) for name, _ in SAMPLE_COLUMNS}
    if not facts:
        return values
    kept, experts = sample.kept, sample.routed_experts
    return values | {
        "kept_counts": None if kept is None else np.diff(kept.ends, prepend=0).astype(np.uint32),
        "kept_ids": None if kept is None else kept.ids,
        "routed_experts": None if experts is None else experts.reshape(-1),
        "routed_shape": None if experts is None else list(experts.shape),
        "trained_logprobs": sample.trained_logprobs,
        "entropies": sample.entropies,
    }
