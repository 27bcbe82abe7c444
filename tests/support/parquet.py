"""Exported Parquet files, read back as the samples that they were written from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow.parquet as pq

from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.tables import SAMPLE_COLUMNS
from bridle.store.records import CallKind, Sampler

_ROWS_PER_GROUP: Final = 64


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Yield the samples of an exported file, in its order."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_PER_GROUP):
            columns = {name: batch.column(name) for name, _ in SAMPLE_COLUMNS}
            for index in range(batch.num_rows):
                yield _sample({name: column[index] for name, column in columns.items()})


def _sample(row: dict[str, Any]) -> Sample:
    values = {name: row[name] for name, _ in SAMPLE_COLUMNS}
    arrays = {
        name: value.values.to_numpy(zero_copy_only=False)
        for name, value in values.items()
        if name in ("token_ids", "mask", "logprobs", "versions", "calls")
    }
    plain = {name: value.as_py() for name, value in values.items() if name not in arrays}
    plain |= {"kind": CallKind(plain["kind"]), "call_ids": tuple(plain["call_ids"])}
    plain |= {name: tuple(plain[name]) for name in ("choices", "roles", "policies")}
    del plain["leaf_choice"]
    plain["samplers"] = tuple(
        None if one is None else msgspec.json.decode(one, type=Sampler) for one in plain["samplers"]
    )
    return Sample(**plain, **arrays)
