"""``bridle export``: recorded sessions as training files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bridle.options import JsonOption, StoreOption
from bridle.reading import reader
from bridle.terminal import fail, out, print_json
from reconstruct.exports.chat_jsonl import export_chat
from reconstruct.exports.parquet import export_parquet
from reconstruct.exports.selection import ExportReport, Selection


class Format(StrEnum):
    """``chat``: OpenAI fine-tuning JSONL with tools. ``tokens``: ids, mask, logprobs as Parquet."""

    CHAT = "chat"
    TOKENS = "tokens"


def export(
    path: Annotated[Path, typer.Argument(help="File to write: .jsonl or .parquet.")],
    store: StoreOption,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Default: tokens for .parquet, chat for .jsonl."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only this run's sessions.")] = None,
    harness: Annotated[str | None, typer.Option(help="Only this harness's.")] = None,
    split: Annotated[str | None, typer.Option(help="Only tasks of this split.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only sessions that ended so.")] = None,
    reward: Annotated[str, typer.Option(help="Name of the reward that is compared.")] = "reward",
    min_reward: Annotated[float | None, typer.Option(help="Only from this reward up.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only up to this reward.")] = None,
    json: JsonOption = False,
) -> None:
    """Write recorded sessions as training data."""
    chosen = form or _by_name(path)
    selection = Selection(
        run=run,
        harness=harness,
        split=split,
        outcome=outcome,
        reward=reward,
        min_reward=min_reward,
        max_reward=max_reward,
    )
    with reader(store) as source:
        write = export_parquet if chosen is Format.TOKENS else export_chat
        report = write(source, path, selection)
    if json:
        print_json(_as_data(report))
        return
    out.print(f"{path}: {report.rows} rows of {report.sessions} sessions", highlight=False)
    for reason, count in report.left_out.items():
        out.print(f"  left out: {count} {reason}", highlight=False)


def _by_name(path: Path) -> Format:
    known = {".parquet": Format.TOKENS, ".jsonl": Format.CHAT}
    if path.suffix not in known:
        fail(f"{path.name} says no format: name it .jsonl or .parquet, or give --format", 2)
    return known[path.suffix]


def _as_data(report: ExportReport) -> dict[str, object]:
    return {
        "path": str(report.path),
        "sessions": report.sessions,
        "rows": report.rows,
        "trained_tokens": report.tokens,
        "left_out": report.left_out,
    }
