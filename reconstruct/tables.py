"""Samples as Arrow rows: one schema for files, the feed and Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

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
    ("roles", "list<string>"),
    ("policies", "list<string>"),
    ("samplers", "list<string>"),
)
"""The fields of a sample, each with the name of its Arrow type."""


def sample_schema(reward_names: Sequence[str]) -> pa.Schema:
    """Return the schema of a row per sample.

    It has the sample's fields, its session's, and a float64 column ``reward.NAME`` for each name.
    Raises :class:`bridle.reconstruct.arrow.ArrowMissing` without pyarrow.
    """
    with needs_arrow():
        import pyarrow as pa

    def column(name: str, kind: str) -> pa.Field:
        inner = kind.removeprefix("list<").removesuffix(">")
        plain = pa.type_for_alias(inner)
        return pa.field(name, plain if inner == kind else pa.list_(plain))

    rewards = ((f"reward.{name}", "double") for name in reward_names)
    return pa.schema([column(*each) for each in (*SAMPLE_COLUMNS, *_SESSION_COLUMNS, *rewards)])


def sample_row(
    session: SessionRecord, sample: Sample, names: Sequence[str], rewards: Mapping[str, float]
) -> dict[str, Any]:
    """Return one row of :func:`sample_schema`."""
    row = {name: getattr(sample, name) for name, _ in SAMPLE_COLUMNS}
    row["samplers"] = [
        None if one is None else msgspec.json.encode(one).decode() for one in sample.samplers
    ]
    row |= {name: getattr(session, name) for name, _ in _SESSION_COLUMNS}
    return row | {f"reward.{name}": rewards.get(name) for name in names}
