"""``bridle ablate``: compare the builders on the same recorded sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bridle.cli.options import HarnessOption, JsonOption, RunOption, StoreOption
from bridle.cli.reading import nothing_found, reader, require_run
from bridle.cli.rules import RulesOption, sample_rules
from bridle.cli.terminal import counted, fail, out, plain_table, print_json
from bridle.diagnosis.ablation import ablate as count
from bridle.extras import install_command

_COLUMNS = (
    ("samples", "samples"),
    ("tokens_trained", "trained"),
    ("tokens_repeated", "repeated"),
    ("padding", "padding"),
    ("tokens_processed", "processed"),
    ("updates", "updates"),
)


def ablate(
    store: StoreOption,
    run: RunOption = None,
    harness: HarnessOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many sessions.")] = None,
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Rows padded to a common length, where rows are padded.")
    ] = 8,
    rows_per_update: Annotated[
        int, typer.Option(min=1, help="Rows (packed sessions for tree) of one update.")
    ] = 32,
    parameters: Annotated[
        float | None, typer.Option(help="The model's size, such as 7e9: adds FLOPs.")
    ] = None,
    rules: RulesOption = "{}",
    plot: Annotated[Path | None, typer.Option(help="Write the comparison as a PNG.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare the builders of samples on recorded sessions.

    The builders are tree, merged and per_call.
    """
    chosen = sample_rules(rules)
    with reader(store) as source:
        require_run(source, run)
        result = count(
            source,
            chosen,
            batch_rows=batch_rows,
            rows_per_update=rows_per_update,
            run=run,
            harness=harness,
            limit=limit,
        )
        if not result.sessions and not result.left_out:
            fail(nothing_found(source))
    data = result.as_data(parameters)
    if plot is not None:
        if not result.sessions:
            fail("there is nothing to plot: every session contradicts itself (`bridle audit`)")
        _plot(data, plot)
    if json:
        print_json(data | {"plot": None if plot is None else str(plot)})
    else:
        _print(data)
        if plot is not None:
            out.print(f"{plot}: tokens by builder, and breaks")


def _print(data: dict[str, Any]) -> None:
    table = plain_table("builder", *(heading for _, heading in _COLUMNS), "compute")
    for name, row in data["builders"].items():
        against = row["compute_against_tree"]
        compute = "–" if against is None else f"{against:.2f}×"
        if row["flops"] is not None:
            compute += f" ({row['flops']:.2e} FLOPs)"
        table.add_row(name, *(f"{row[key]:,}" for key, _ in _COLUMNS), compute)
    out.print(f"{counted(data['sessions'], 'session')}, {counted(data['calls'], 'call')}")
    out.print(table)
    for label, counts in (("break", data["breaks"]), ("left out", data["left_out"])):
        for reason, number in counts.items():
            out.print(f"  {label}: {number} {reason}")


def _plot(data: dict[str, Any], path: Path) -> None:
    """Plot the tokens through the model by builder, stacked, and the breaks beside them."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        fail(f"a plot needs matplotlib: {install_command('train')}")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    tokens, breaks = figure.subplots(1, 2, width_ratios=[3, 2])
    names = list(data["builders"])
    left = [0] * len(names)
    for key, label in (
        ("tokens_unique", "unique"),
        ("tokens_repeated", "repeated"),
        ("padding", "padding"),
    ):
        values = [data["builders"][name][key] for name in names]
        tokens.barh(names, values, left=left, label=label)
        left = [before + value for before, value in zip(left, values, strict=True)]
    tokens.invert_yaxis()
    tokens.set_xlabel("tokens through the model in one pass")
    tokens.legend()
    reasons = data["breaks"] or {"none": 0}
    breaks.barh(list(reasons), list(reasons.values()), color="tab:gray")
    breaks.invert_yaxis()
    breaks.set_xlim(0, max(1, *reasons.values()) * 1.05)
    breaks.xaxis.set_major_locator(MaxNLocator(integer=True))
    breaks.set_xlabel(f"breaks in {data['calls']} calls")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
