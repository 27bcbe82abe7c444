"""Samples, sessions and calls as Arrow tables: one schema for files, the feed and Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from bridle.reconstruct.samples.sample import Sample
from bridle.store.encoding.packing import dump_json
from bridle.store.reading.queries import CallRow
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
    row |= {name: getattr(session, name) for name, _ in _SESSION_COLUMNS}
    return row | {f"reward.{name}": rewards.get(name) for name in names}


def session_table(
    sessions: Iterable[tuple[SessionRecord, Mapping[str, float]]], reward_names: Sequence[str]
) -> pa.Table:
    """A row per session with its rewards; settings and labels as JSON text."""
    rows = [
        _flat(session, leave={"key_hash"})
        | {f"reward.{name}": rewards.get(name) for name in reward_names}
        for session, rewards in sessions
    ]
    return _table(rows, SessionRecord, {"key_hash"}, reward_names)


def call_table(calls: Iterable[CallRow]) -> pa.Table:
    """A row per call; what is nested (usage, replies, notes …) as JSON text."""
    leave = {"conversation", "replies"}
    rows = [
        _flat(call, leave) | {"replies": dump_json([r.to_chat() for r in call.replies]).decode()}
        for call in calls
    ]
    return _table(rows, CallRow, {"conversation"})


def _flat(record: Any, leave: set[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        if field.name in leave:
            continue
        value = getattr(record, field.name)
        if isinstance(value, Mapping):
            value = dump_json(value).decode()
        elif isinstance(value, tuple):
            value = dump_json([dataclasses.asdict(item) for item in value]).decode()
        flat[field.name] = str(value) if isinstance(value, str) else value
    return flat


def _table(
    rows: list[dict[str, Any]], record: type, leave: set[str], reward_names: Sequence[str] = ()
) -> pa.Table:
    columns = [
        (field.name, _arrow_type(str(field.type)))
        for field in dataclasses.fields(record)
        if field.name not in leave
    ]
    columns += [(f"reward.{name}", pa.float64()) for name in reward_names]
    return pa.Table.from_pylist(rows, pa.schema(columns))


def _arrow_type(annotation: str) -> pa.DataType:
    plain = annotation.removesuffix(" | None")
    known = {"float": pa.float64(), "int": pa.int64(), "bool": pa.bool_()}
    return known.get(plain, pa.string())
