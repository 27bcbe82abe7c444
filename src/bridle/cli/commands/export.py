"""``bridle export``: write recorded sessions as training files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bridle.cli.options import JsonOption, RunOption, StoreOption
from bridle.cli.reading import nothing_found, one_session, reader, require_run
from bridle.cli.rules import RulesOption, sample_rules
from bridle.cli.settings import settable
from bridle.cli.terminal import counted, fail, out, print_json
from bridle.reconstruct.conditions import Condition
from bridle.reconstruct.exports.card import write_card
from bridle.reconstruct.exports.formats import NoFormat, file_format, format_of
from bridle.reconstruct.exports.formats import export as write
from bridle.reconstruct.exports.selection import ExportReport, Selection, select
from bridle.reconstruct.samples.builders import BUILDERS
from bridle.run.settings import parse_overrides, settings_from
from bridle.store.reading.queries import Reader

_OWN_OPTIONS: Final = {
    "sessions": "--session",
    "run": "--run",
    "min_reward": "--min-reward",
    "where": "--where",
    "rules": "--rules",
    "part": "--eval-share",
    "eval_share": "--eval-share",
}
SelectionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another condition on sessions: harness, split, outcome (open: not sealed), reward "
        "(the bounds' reward; default: the session's number), max_reward, reward_sources "
        '(["verifier"]), deduplicate (true: no repeated rows), pairs (of preference: replies, '
        "sessions, all). Repeatable.",
    ),
]


@settable("bridle.reconstruct.exports.selection:Selection")
def export(
    path: Annotated[Path, typer.Argument(help="File to write: .jsonl, .parquet or .csv.")],
    store: StoreOption,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="chat, tokens, trl, trl-prompt-completion, preference, preference-labels, "
            "sharegpt, adp, atif, csv, an installed one, or FILE.py:NAME. Default: tokens "
            "(.parquet), chat (.jsonl), csv (.csv).",
        ),
    ] = None,
    session: Annotated[
        list[str] | None,
        typer.Option(help="Only this session: id, name, beginning, or `last`. Repeatable."),
    ] = None,
    run: RunOption = None,
    min_reward: Annotated[float | None, typer.Option(help="Lowest reward.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="Any column: harness=pi, call.dialect!=chat, label.x=1, task.suite=…"),
    ] = None,
    rules: RulesOption = "{}",
    eval_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of tasks to hold out, in a second file."),
    ] = None,
    builder: Annotated[str, typer.Option(help="tokens: tree, merged or per_call.")] = "tree",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    assignments: SelectionOption = None,
    json: JsonOption = False,
) -> None:
    """Write recorded sessions as training data, with a data card."""
    if builder not in BUILDERS:
        fail(f"there is no builder {builder!r}: {', '.join(BUILDERS)}", 2)
    conditions = [Condition.parse(text) for text in where or []]
    try:
        chosen = file_format(path, form)
    except NoFormat as error:
        fail(str(error), 2)
    text = format_of(chosen).messages
    chosen_rules = sample_rules(rules, imitation=text, messages=text)
    chosen_rules = replace(
        chosen_rules,
        where=(*chosen_rules.where, *(c for c in conditions if c.of == "call")),
    )
    selection = replace(
        _selected(assignments or ()),
        run=run,
        min_reward=min_reward,
        rules=chosen_rules,
        where=tuple(condition for condition in conditions if condition.of != "call"),
    )
    with reader(store) as source:
        require_run(source, run)
        named = tuple(one_session(source, each).id for each in session or ())
        selection = replace(selection, sessions=named)
        parts = _parts(path, selection, eval_share)
        if not force and (there := [str(file) for file, _ in parts if file.exists()]):
            fail(f"{' and '.join(there)} is there already: --force replaces it")
        _require_sessions(source, selection)
        written = [_write(source, file, chosen, part, builder) for file, part in parts]
    if json:
        print_json(written[0] if eval_share is None else {"files": written})
        return
    for file in written:
        rows, sessions = counted(file["rows"], "row"), counted(file["sessions"], "session")
        out.print(f"{file['path']}: {rows} of {sessions}")
        for reason, count in file["left_out"].items():
            out.print(f"  left out: {count} {reason}")
        for reason, count in file["untrained_tokens"].items():
            out.print(f"  tokens not trained: {count} {reason}")


def _selected(assignments: Sequence[str]) -> Selection:
    overrides = parse_overrides(assignments)
    for name, option in _OWN_OPTIONS.items():
        if any(one.partition(".")[0] == name for one in overrides):
            fail(f"--set {name}: use {option}", 2)
    return settings_from(Selection, overrides=overrides)


def _require_sessions(source: Reader, selection: Selection) -> None:
    """End the command if the selection takes no session, before any file is made."""
    report = ExportReport(Path())
    if next(select(source, selection, report), None) is not None or report.sessions:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
    fail(nothing_found(source) + (f"; left out: {reasons}" if reasons else ""))


def _parts(
    path: Path, selection: Selection, eval_share: float | None
) -> list[tuple[Path, Selection]]:
    if eval_share is None:
        return [(path, selection)]
    return [
        (
            path.with_name(f"{path.stem}.{part}{path.suffix}"),
            replace(selection, part=part, eval_share=eval_share),
        )
        for part in ("train", "eval")
    ]


def _write(
    source: Reader, path: Path, form: str, selection: Selection, builder: str
) -> dict[str, Any]:
    report = write(source, path, form, selection, builder)
    card = write_card(report, form, selection, time.time())
    return _as_data(report) | {"card": str(card)}


def _as_data(report: ExportReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "sessions": report.sessions,
        "rows": report.rows,
        "trainable_tokens": report.tokens,
        "untrained_tokens": dict(report.untrained),
        "left_out": report.left_out,
    }
