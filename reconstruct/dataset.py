"""The recorded store in Python: typed objects, samples as an Arrow table, and SQL as Arrow tables.

>>> with open_store("runs/bridle.db") as store:
...     for session in store.sessions(harness="codex"):
...         print(session.record.id, session.rewards, len(session.samples()))
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from bridle.reconstruct.arrow import needs_arrow
from bridle.reconstruct.audit import SessionAudit, audit_loaded
from bridle.reconstruct.exports.card import write_card
from bridle.reconstruct.exports.formats import export as export_file
from bridle.reconstruct.exports.formats import file_format, format_of
from bridle.reconstruct.exports.selection import ExportReport, Selection
from bridle.reconstruct.notebook import session_html, sessions_frame
from bridle.reconstruct.rewards import CountedRewards
from bridle.reconstruct.samples.builders import Built, build
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.samples.scores import with_scores
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tables import sample_row, sample_schema
from bridle.store.reading.queries import Reader
from bridle.store.schema.files import default_store

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class RecordedSession(LoadedSession):
    """A session as it was at one moment, with methods that build its samples and audit it."""

    def build(self, rules: SampleRules = DEFAULT_RULES, builder: str = "tree") -> Built:
        """Build the samples and the account of every sampled token."""
        return build(self, rules, builder)

    def samples(
        self, rules: SampleRules = DEFAULT_RULES, builder: str = "tree"
    ) -> tuple[Sample, ...]:
        """Return the session's samples for a trainer."""
        return self.build(rules, builder).samples

    def audit(self, *, bodies: bool = False) -> SessionAudit:
        """Audit the record; with ``bodies``, every body is verified as well."""
        return audit_loaded(self, bodies=bodies)

    def _repr_html_(self) -> str:
        return session_html(self)


class Sessions(Iterator[RecordedSession]):
    """Sessions, loaded one after the other; each is yielded once."""

    def __init__(self, loaded: Iterator[RecordedSession]) -> None:
        self._loaded = loaded

    def __next__(self) -> RecordedSession:
        return next(self._loaded)

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame with a row for each remaining session, its counts and its rewards.

        The columns are those of :func:`bridle.reconstruct.notebook.sessions_frame`. Raise
        :class:`bridle.reconstruct.notebook.PandasMissing` if pandas is not installed.
        """
        return sessions_frame(self)


class RecordedStore:
    """A store that is open for reading. Close it, or use it as a context manager."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __enter__(self) -> RecordedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.reader.close()

    def session(self, wanted: str) -> RecordedSession:
        """Return the session with this id or name.

        Raise :class:`bridle.store.errors.NotFound` if there is none.
        """
        named = self.reader.session_by_name(wanted)
        record = self.reader.session(wanted if named is None else named.id)
        counted = CountedRewards(self.reader)
        return next(RecordedSession.stream(self.reader, [record], counted=counted))

    def sessions(self, **filters: Any) -> Sessions:
        """Return the sessions that match ``filters``, oldest first, with the rewards that count.

        The filters are those of ``Reader.sessions``. The rewards that count are those of
        :class:`bridle.reconstruct.rewards.CountedRewards`.
        """
        records = self.reader.sessions(**filters)
        counted = CountedRewards(self.reader)
        return Sessions(RecordedSession.stream(self.reader, records, counted=counted))

    def samples_table(
        self,
        rules: SampleRules = DEFAULT_RULES,
        builder: str = "tree",
        *,
        facts: bool = False,
        **filters: Any,
    ) -> pa.Table:
        """Return a table with one row per sample and the columns of ``bridle export``'s Parquet.

        With ``facts``, they are those of ``--set facts=true``.
        """
        with needs_arrow():
            import pyarrow as pa
        names = self.reader.reward_names()
        rows = []
        for session in self.sessions(**filters):
            samples = session.samples(rules, builder)
            rows += [
                sample_row(session.record, sample, names, session.rewards, facts=facts)
                for sample in (with_scores(self.reader, samples) if facts else samples)
            ]
        return pa.Table.from_pylist(rows, sample_schema(names, facts=facts))

    def export(
        self, path: str | Path, form: str | None = None, *, builder: str = "tree", **conditions: Any
    ) -> ExportReport:
        """Write sessions as ``bridle export`` does, with their data card, and return the counts.

        ``form`` is a name of :data:`bridle.reconstruct.exports.formats.EXPORTS`; by default the
        path's ending decides: ``tokens`` for .parquet, ``chat`` for .jsonl, ``csv`` for .csv.
        ``conditions`` are fields of :class:`bridle.reconstruct.exports.selection.Selection`, such
        as ``run`` or ``min_reward``. Formats of messages take replies of any sampler, unless
        ``rules`` are given. ``builder`` makes the samples of ``tokens``. An existing file is
        overwritten.

        Raise :class:`bridle.reconstruct.exports.formats.NoFormat` if the path and ``form`` name no
        format, or different ones.
        """
        chosen = file_format(Path(path), form)
        if format_of(chosen).messages:
            conditions = {"rules": SampleRules(samplers="any", media=True)} | conditions
        selection = Selection(**conditions)
        report = export_file(self.reader, path, chosen, selection, builder)
        write_card(report, chosen, selection, time.time())
        return report

    def query(self, sql: str, **values: Any) -> pa.Table:
        """Return the result of an SQL query. Its ``:name`` parameters are taken from ``values``."""
        with needs_arrow():
            import pyarrow as pa
        with self.reader.engine.connect() as connection:
            result = connection.execute(text(sql), values)
            columns, rows = list(result.keys()), result.all()
        return pa.table({name: [row[i] for row in rows] for i, name in enumerate(columns)})


def open_store(source: str | Path | None = None) -> RecordedStore:
    """Open a store for reading: an SQLite file, or a database URL; by default the user's own.

    Raise :class:`FileNotFoundError` if the file does not exist; reading never creates one.
    """
    address = default_store() if source is None else str(source)
    if "://" not in address and not Path(address).exists():
        raise FileNotFoundError(f"there is no store at {address}")
    return RecordedStore(Reader(address))


def export(
    path: str | Path,
    form: str | None = None,
    *,
    store: str | Path | None = None,
    builder: str = "tree",
    **conditions: Any,
) -> ExportReport:
    """Write sessions of ``store``, by default the user's own, as a training file.

    The other arguments, the result and the errors are those of :meth:`RecordedStore.export` and
    :func:`open_store`.
    """
    with open_store(store) as opened:
        return opened.export(path, form, builder=builder, **conditions)
