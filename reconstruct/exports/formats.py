"""The export formats by their names in ``bridle export --format``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

from bridle.reconstruct.accounts import account_lines, account_of_sessions
from bridle.reconstruct.arrow import needs_arrow
from bridle.reconstruct.exports.adp import adp_rows
from bridle.reconstruct.exports.atif import atif_rows
from bridle.reconstruct.exports.chat_jsonl import chat_rows
from bridle.reconstruct.exports.lines import Rows, export_lines
from bridle.reconstruct.exports.message_csv import HEADING, csv_line, message_rows
from bridle.reconstruct.exports.selection import ExportReport, Selection
from bridle.reconstruct.exports.sharegpt import sharegpt_rows
from bridle.reconstruct.exports.trl import conversational_rows, prompt_completion_rows
from bridle.store.reading.queries import Reader


class ExportFormat(StrEnum):
    """The format of an exported file."""

    CHAT = "chat"
    """OpenAI fine-tuning JSONL, with tools."""
    TOKENS = "tokens"
    """Ids, mask, logprobs and policy versions as Parquet, exact."""
    TRL = "trl"
    """TRL conversational, with tool schemas."""
    TRL_PROMPT_COMPLETION = "trl-prompt-completion"
    SHAREGPT = "sharegpt"
    ADP = "adp"
    """Agent Data Protocol."""
    CSV = "csv"
    """A table of messages."""
    ATIF = "atif"
    """Agent Trajectory Interchange Format (Harbor)."""


LINES: Final[Mapping[ExportFormat, Rows]] = {
    ExportFormat.CHAT: chat_rows,
    ExportFormat.TRL: conversational_rows,
    ExportFormat.TRL_PROMPT_COMPLETION: prompt_completion_rows,
    ExportFormat.SHAREGPT: sharegpt_rows,
    ExportFormat.ADP: adp_rows,
    ExportFormat.ATIF: atif_rows,
}


def export(
    reader: Reader,
    path: str | Path,
    form: ExportFormat,
    selection: Selection | None = None,
    builder: str = "tree",
) -> ExportReport:
    """Write the selected sessions; ``builder`` makes the samples of ``tokens``."""
    report = _export(reader, path, form, selection, builder)
    account = account_of_sessions(reader, report.session_ids)
    report.account = {line.label: line.tokens for line in account_lines(account.fates)}
    return report


def _export(
    reader: Reader,
    path: str | Path,
    form: ExportFormat,
    selection: Selection | None,
    builder: str,
) -> ExportReport:
    if form is ExportFormat.TOKENS:
        with needs_arrow():
            from bridle.reconstruct.exports.parquet import export_parquet

        return export_parquet(reader, path, selection, builder)
    if form is ExportFormat.CSV:
        return export_lines(reader, path, message_rows, selection, encode=csv_line, heading=HEADING)
    return export_lines(reader, path, LINES[form], selection)
