"""Tokens, masks and logprobs as Parquet: a row per sample, exact to the bit.

``datasets.load_dataset("parquet", data_files=…)`` reads it. Every reward name of the store is a
column ``reward.NAME`` (float64, null where the session has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bridle.reconstruct.exports.selection import ExportReport, Selection, select
from bridle.reconstruct.samples.builders import BUILDER_VERSION, build
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.samples.scores import with_scores
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tables import sample_row, sample_schema
from bridle.store.encoding.packing import dump_json
from bridle.store.reading.queries import CallRow, Reader

_ROWS_PER_GROUP: Final = 64


def export_parquet(
    reader: Reader,
    path: str | Path,
    selection: Selection | None = None,
    builder: str = "tree",
) -> ExportReport:
    """Write the selected sessions' samples to ``path``; memory holds a few sessions at a time."""
    selection = selection or Selection()
    report = ExportReport(Path(path))
    report.path.parent.mkdir(parents=True, exist_ok=True)
    names = reader.reward_names()
    provenance = {
        b"bridle.builder": f"{builder}/{BUILDER_VERSION}".encode(),
        b"bridle.rules": dump_json(selection.rules.as_data()),
    }
    schema = sample_schema(names, facts=selection.facts).with_metadata(provenance)
    waiting: list[dict[str, Any]] = []
    with pq.ParquetWriter(report.path, schema, compression="zstd") as file:
        for session in select(reader, selection, report):
            built = build(session, selection.rules, builder)
            if not built.samples:
                report.leave_out("session_without_trained_tokens")
            report.untrained.update(built.conservation.untrained)
            written = []
            facts = selection.facts
            for sample in with_scores(reader, built.samples) if facts else built.samples:
                tokens = int(np.count_nonzero(sample.mask))
                content = (sample.token_ids.tobytes(), sample.mask.tobytes())
                if selection.deduplicate and report.repeats(*content):
                    report.leave_out("duplicate")
                    report.untrained["duplicate"] += tokens
                    continue
                row = sample_row(session.record, sample, names, session.rewards, facts=facts)
                waiting.append(row)
                written.append(sample)
                report.tokens += tokens
            report.take_rows(len(written), session, _trained(session, written))
            if len(waiting) >= _ROWS_PER_GROUP:
                file.write_table(pa.Table.from_pylist(waiting, schema))
                waiting.clear()
        if waiting:
            file.write_table(pa.Table.from_pylist(waiting, schema))
    return report


def _trained(session: LoadedSession, samples: Sequence[Sample]) -> list[CallRow]:
    """Return the calls of which a sample trains a token, in the order of their start."""
    found = {
        sample.call_ids[index]
        for sample in samples
        for index in np.unique(sample.calls[sample.mask])
    }
    return [call for call in session.calls if call.id in found]
