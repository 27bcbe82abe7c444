"""The export formats: the open set from which ``bridle export --format`` takes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bridle.errors import BridleError
from bridle.reconstruct.accounts import account_lines, account_of_sessions
from bridle.reconstruct.arrow import needs_arrow
from bridle.reconstruct.exports.lines import Rows, export_lines, json_line
from bridle.reconstruct.exports.message_csv import HEADING, csv_line, message_rows
from bridle.reconstruct.exports.selection import ExportReport, Selection
from bridle.registry import Registry, UnknownPart
from bridle.store.reading.queries import Reader


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format of exported files."""

    write: Callable[[Reader, str | Path, Selection | None, str], ExportReport]
    """A function that writes the selected sessions to a path. Its last argument names the builder
    of samples, for a format that has samples."""
    suffix: str = ".jsonl"
    """The ending of its files."""
    messages: bool = True
    """True if it trains whole messages. Otherwise it trains sampled tokens."""


def of_rows(
    rows: Rows,
    encode: Callable[[Mapping[str, Any]], bytes] = json_line,
    heading: bytes = b"",
    suffix: str = ".jsonl",
) -> ExportFormat:
    """Return the format that writes ``heading`` and then each row of ``rows``.

    A row is written as ``encode`` does.
    """

    def write(
        reader: Reader, path: str | Path, selection: Selection | None, _: str
    ) -> ExportReport:
        return export_lines(reader, path, rows, selection, encode=encode, heading=heading)

    return ExportFormat(write, suffix)


def _write_tokens(
    reader: Reader, path: str | Path, selection: Selection | None, builder: str
) -> ExportReport:
    with needs_arrow():
        from bridle.reconstruct.exports.parquet import export_parquet

    return export_parquet(reader, path, selection, builder)


CSV: Final = of_rows(message_rows, csv_line, HEADING, ".csv")
TOKENS: Final = ExportFormat(_write_tokens, ".parquet", messages=False)

EXPORTS: Final[Registry[ExportFormat | Rows]] = Registry(
    "export",
    "bridle.exports",
    {
        "chat": "bridle.reconstruct.exports.chat_jsonl:chat_rows",
        "tokens": "bridle.reconstruct.exports.formats:TOKENS",
        "trl": "bridle.reconstruct.exports.trl:conversational_rows",
        "trl-prompt-completion": "bridle.reconstruct.exports.trl:prompt_completion_rows",
        "preference": "bridle.reconstruct.exports.preference:PAIRS",
        "preference-labels": "bridle.reconstruct.exports.preference:LABELS",
        "sharegpt": "bridle.reconstruct.exports.sharegpt:sharegpt_rows",
        "adp": "bridle.reconstruct.exports.adp:adp_rows",
        "csv": "bridle.reconstruct.exports.formats:CSV",
        "atif": "bridle.reconstruct.exports.atif:atif_rows",
        "replay": "bridle.reconstruct.exports.replay:TRACE",
    },
)
"""The export formats. A part is an :class:`ExportFormat`, or a function that returns the rows of a
conversation, which are written as lines of JSON."""


def format_of(name: str) -> ExportFormat:
    """Return the format that ``name`` names.

    Raise :class:`bridle.registry.UnknownPart`, and the other errors of
    :meth:`bridle.registry.Registry.get`.
    """
    part = EXPORTS.get(name)
    if isinstance(part, ExportFormat):
        return part
    if not callable(part):
        raise UnknownPart(
            f"{name} is no export: name an ExportFormat or a function that gives rows"
        )
    return of_rows(part)


class NoFormat(BridleError, ValueError):
    """A file's name and the wanted format name no format, or different ones."""


def file_format(path: Path, wanted: str | None = None) -> str:
    """Return the name of the format in which ``path`` is written: ``wanted``, or its ending's.

    Raise :class:`NoFormat`, and the errors of :func:`format_of`.
    """
    named = {".parquet": "tokens", ".jsonl": "chat", ".csv": "csv"}.get(path.suffix)
    chosen = wanted or named
    if chosen is None:
        raise NoFormat(
            f"{path} names no format: call it .jsonl, .parquet or .csv, or give --format"
        )
    ending = format_of(chosen).suffix
    if named is not None and path.suffix != ending:
        raise NoFormat(f"{path.name} is no name for {chosen}, which is written as {ending}")
    return chosen


def export(
    reader: Reader,
    path: str | Path,
    form: str,
    selection: Selection | None = None,
    builder: str = "tree",
) -> ExportReport:
    """Write the selected sessions in the format ``form``, a name of :data:`EXPORTS`.

    ``builder`` makes the samples of ``tokens``.
    """
    report = format_of(form).write(reader, path, selection, builder)
    account = account_of_sessions(reader, report.session_ids)
    report.account = {line.label: line.tokens for line in account_lines(account.fates)}
    return report
