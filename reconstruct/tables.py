"""Samples as Arrow rows: one schema for files, the feed and Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from bridle.reconstruct.samples.sample import Sample
from bridle.store.records import SessionRecord

_SESSION_COLUMNS: Final = (
    ("run_id", pa.string()),
    ("task_suite", pa.string()),
    ("task_split", pa.string()),
    ("task_id", pa.string()),
    ("group_id", pa.string()),
    ("harness", pa.string()),
)
SAMPLE_COLUMNS: Final = (
    ("session_id", pa.string()),
    ("leaf_call_id", pa.string()),
    ("leaf_choice", pa.int32()),
    ("kind", pa.string()),
    ("role", pa.string()),
    ("weight", pa.float64()),
    ("token_ids", pa.list_(pa.uint32())),
    ("mask", pa.list_(pa.bool_())),
    ("logprobs", pa.list_(pa.float32())),
    ("versions", pa.list_(pa.int64())),
    ("calls", pa.list_(pa.int32())),
    ("call_ids", pa.list_(pa.string())),
    ("roles", pa.list_(pa.string())),
    ("samplers", pa.list_(pa.string())),
)
"""The fields of a sample."""


def sample_schema(reward_names: Sequence[str]) -> pa.Schema:
    """A row per sample: its fields, its session's, and a float64 column ``reward.NAME`` for each
    name."""
    rewards = ((f"reward.{name}", pa.float64()) for name in reward_names)
    return pa.schema([*SAMPLE_COLUMNS, *_SESSION_COLUMNS, *rewards])


def sample_row(
    session: SessionRecord, sample: Sample, names: Sequence[str], rewards: Mapping[str, float]
) -> dict[str, Any]:
    """One row of :func:`sample_schema`."""
    row = {name: getattr(sample, name) for name, _ in SAMPLE_COLUMNS}
    row["samplers"] = [
        None if one is None else msgspec.json.encode(one).decode() for one in sample.samplers
    ]
    row |= {name: getattr(session, name) for name, _ in _SESSION_COLUMNS}
    return row | {f"reward.{name}": rewards.get(name) for name in names}
