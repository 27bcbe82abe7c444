"""Samples as Arrow rows: one schema for files, the feed and Python.

pyarrow is loaded when a schema is made: to record needs none (the extra ``arrow``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bridle.reconstruct.samples.sample import Sample
from bridle.store.records import SessionRecord

if TYPE_CHECKING:
    import pyarrow as pa

_SESSION_COLUMNS: Final = (
    "run_id",
    "task_suite",
    "task_split",
    "task_id",
    "group_id",
    "harness",
)
SAMPLE_COLUMNS: Final = {
    "session_id": "string",
    "leaf_call_id": "string",
    "leaf_choice": "int32",
    "kind": "string",
    "role": "string",
    "weight": "float64",
    "token_ids": "[uint32]",
    "mask": "[bool]",
    "logprobs": "[float32]",
    "versions": "[int64]",
    "calls": "[int32]",
    "call_ids": "[string]",
    "roles": "[string]",
    "samplers": "[string]",
}
"""The fields of a sample and Arrow's name of their type; brackets are a list."""


def sample_schema(reward_names: Sequence[str]) -> pa.Schema:
    """A row per sample: its fields, its session's, and a float64 column ``reward.NAME`` for each
    name."""
    import pyarrow as pa

    def arrow_type(name: str) -> pa.DataType:
        listed = name.startswith("[")
        return pa.list_(arrow_type(name[1:-1])) if listed else pa.type_for_alias(name)

    fields = SAMPLE_COLUMNS | dict.fromkeys(_SESSION_COLUMNS, "string")
    fields |= {f"reward.{name}": "float64" for name in reward_names}
    return pa.schema([(name, arrow_type(kind)) for name, kind in fields.items()])


def sample_row(
    session: SessionRecord, sample: Sample, names: Sequence[str], rewards: Mapping[str, float]
) -> dict[str, Any]:
    """One row of :func:`sample_schema`."""
    row = {name: getattr(sample, name) for name in SAMPLE_COLUMNS}
    row["samplers"] = [
        None if one is None else msgspec.json.encode(one).decode() for one in sample.samplers
    ]
    row |= {name: getattr(session, name) for name in _SESSION_COLUMNS}
    return row | {f"reward.{name}": rewards.get(name) for name in names}
