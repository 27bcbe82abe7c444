"""The figures of ``bridle bench rivals`` as a page and on the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

_HEAD: Final = """# Performance

What a proxy costs, on the same traffic: every arm leads the same sessions in its turn in each of
{rounds} rounds, in front of one engine. Made on {date}, on {cores} cores ({processor}) with Python
{python}, by

```console
{command}
```

Every proxy has one process on one core; the engine and the load have others where there are enough.

- **kept**: requests per second, divided by those of direct requests in the same round: the median
  over the rounds, and the range.
- **first token**: milliseconds to the first event that the arm adds to the 50th and 99th
  percentile.
- **between tokens**: milliseconds between events, 50th and 99th percentile.
- **memory**: the largest resident memory of the process and its children, MiB.
- **recorded exactly**: the share of calls whose sampled token ids are in the arm's own record.
  {recorded}

"""
_SCRIPTED: Final = (
    "The engine is scripted; the ids follow from the reply's text, so the record is checked token "
    "for token. Its tokens are {gap_ms:g} ms apart."
)
_VLLM: Final = "The engine is vLLM; a call counts if the record has as many ids as were sampled."
_COLUMNS: Final = (
    "| | kept | first token, added | between tokens | memory | recorded exactly | failed calls |\n"
    "|---|---|---|---|---|---|---|\n"
)


def page(report: Mapping[str, Any]) -> str:
    """Return the report of :func:`bridle.bench.rivals.measure.measure` as Markdown."""
    scripted = report["engine"] == "scripted"
    machine = report["machine"]
    head = _HEAD.format(
        rounds=report["rounds"],
        date=report["date"],
        cores=machine["cores"],
        processor=machine["processor"],
        python=report["python"],
        command=shlex.join(["bridle", *sys.argv[1:]]),
        recorded=_SCRIPTED.format(**report) if scripted else _VLLM,
    )
    return head + _arms(report) + "".join(_table(*one) for one in report["workloads"].items())


def _arms(report: Mapping[str, Any]) -> str:
    lines = [
        f"- `{name}`{' ' * bool(arm['version'])}{arm['version']}: {arm['what']}.\n"
        for name, arm in report["arms"].items()
    ]
    lines += [f"- `{name}`: not measured.\n" for name in report["missing"]]
    return "".join(lines)


def _table(name: str, workload: Mapping[str, Any]) -> str:
    p50, p99 = workload["input_tokens"]
    head = (
        f"\n## {name}\n\n{workload['concurrency']} sessions at a time, of {workload['turns']} "
        f"call{'s' * (workload['turns'] > 1)} each; about {p50:,} tokens in a median request "
        f"({p99:,} in the largest), {workload['reply']} in a reply.\n\n"
    )
    return (
        head
        + _COLUMNS
        + "".join(_row(*one) for one in workload["arms"].items())
        + "".join(
            f"| {arm} | did not start | – | – | – | – | – |\n" for arm in workload["unstarted"]
        )
    )


def _row(name: str, arm: Mapping[str, Any]) -> str:
    return f"| {' | '.join([name, *_cells(arm)])} |\n"


def _cells(arm: Mapping[str, Any]) -> Sequence[str]:
    if "throughput_kept" not in arm:
        return ["–", "–", "–", "–", "–", f"{arm['failed']}"]
    kept, low, high = arm["throughput_kept"]
    first, between = arm["added_first_ms"], arm["between_ms"]
    return [
        f"{kept:.1%} ({low:.1%} to {high:.1%})",
        f"{first[0]:+.1f} / {first[1]:+.1f}",
        f"{between[0]:.2f} / {between[1]:.2f}",
        f"{arm['rss_mb']:.0f}" if arm["rss_mb"] else "–",
        f"{arm['recorded_exactly']:.1%}" if arm["keeps_record"] else "keeps none",
        f"{arm['failed']}",
    ]


def summary(report: Mapping[str, Any]) -> str:
    """Return the tables, errors, and the arms that are missing with what installs them."""
    text = "".join(_table(*one) for one in report["workloads"].items()).strip()
    for workload, found in report["workloads"].items():
        for name, arm in found["arms"].items():
            if arm["error"]:
                text += f"\n{workload}, {name}: {arm['error']}"
        text += "".join(f"\n{failure}" for failure in found["unstarted"].values())
    for name, command in report["missing"].items():
        text += f"\n{name} is not installed: {command}"
    return text
