"""The figures of ``bridle bench rivals`` as a page and on the terminal.

The page has a part for each engine and client: proxies in front of the scripted engine, the same
led by AIPerf, and then vLLM. A report replaces its own part and leaves the others as they are.
"""

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
The engine is scripted, and its tokens are {gap_ms:g} ms apart.

- **kept**: requests per second, divided by those of direct requests in the same round: the median
  over the rounds, and the range.
- **first token**: milliseconds to the first event that the arm adds to the 50th and 99th
  percentile.
- **between tokens**: milliseconds between events, 50th and 99th percentile.
- **memory**: the largest resident memory of the process and its children, MiB.
- **recorded exactly**: the share of calls that are complete in the arm's own record, with the
  sampled token ids. The ids follow from the reply's text, so the record is checked token for token.

"""
_AIPERF: Final = "## Led by AIPerf"
_AIPERF_HEAD: Final = (
    _AIPERF
    + """

The same sessions, led by NVIDIA's AIPerf {client_version}, whose own figures these are, {rounds}
rounds. Made on {date}, on {cores} cores ({processor}) with Python {python}, by

```console
{command}
```

AIPerf shares the engine's core if there are two, so that it is slower than the load above, and a
proxy costs less beside it. It gives no session a URL of its own: all sessions of a round share one.

"""
)
_VLLM: Final = "## Through vLLM"
_VLLM_HEAD: Final = (
    _VLLM
    + """

Sessions of 100,000 tokens on a real vLLM{model}, {rounds} rounds. Made on {date}, on {cores} cores
({processor}) with Python {python}, by

```console
{command}
```

vLLM has one core; the proxies and the load share the others. A call is recorded exactly if it is
complete and the record has as many ids as were sampled.

- **requests**: requests per second, divided by those of direct requests in the same round: the
  median over the rounds, and the range.
- **first token**: milliseconds to the first event, 50th and 99th percentile; then the 50th divided
  by that of direct requests.

"""
)
_SMALL: Final = ", which serves one small layer with a genuine tokenizer so that its own work shows"
_COLUMNS: Final = (
    "| | kept | first token, added | between tokens | memory | recorded exactly | failed calls |\n"
    "|---|---|---|---|---|---|---|\n"
)
_VLLM_COLUMNS: Final = (
    "| | requests | first token | ÷ direct | between tokens | recorded exactly | failed calls |\n"
    "|---|---|---|---|---|---|---|\n"
)


_PARTS: Final = {"": _HEAD, _AIPERF: _AIPERF_HEAD, _VLLM: _VLLM_HEAD}
"""The head of each part by its heading, in their order on the page."""


def page(report: Mapping[str, Any], earlier: str = "") -> str:
    """Return the report of :func:`bridle.bench.rivals.measure.measure` as Markdown.

    ``earlier`` is the page as it was; its other parts stay.
    """
    parts = dict.fromkeys(_PARTS, "")
    rest = earlier
    for name in reversed(_PARTS):
        before, mark, own = rest.partition(f"{name}\n") if name else ("", "", rest)
        parts[name] = mark + own
        rest = before if mark or not name else rest
    own_name = _name(report)
    parts[own_name] = _part(_PARTS[own_name], report)
    return "\n\n".join(part.strip() for part in parts.values() if part.strip()) + "\n"


def _name(report: Mapping[str, Any]) -> str:
    """Return the heading of the report's part of the page."""
    if report["engine"] == "vllm":
        return _VLLM
    return _AIPERF if report["client"] == "aiperf" else ""


def _part(head: str, report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    filled = head.format(
        rounds=report["rounds"],
        date=report["date"],
        cores=machine["cores"],
        processor=machine["processor"],
        python=report["python"],
        command=shlex.join(["bridle", *sys.argv[1:]]),
        gap_ms=report["gap_ms"],
        client_version=report["client_version"],
        model=_SMALL if report["model"] is None else f" ({report['model']})",
    )
    return filled + _arms(report) + _tables(report)


def _tables(report: Mapping[str, Any]) -> str:
    on_vllm = report["engine"] == "vllm"
    mark = "###" if _name(report) else "##"
    loads = report["workloads"].items()
    return "".join(f"\n{mark} {name}\n\n" + _table(load, on_vllm) for name, load in loads)


def _arms(report: Mapping[str, Any]) -> str:
    lines = [
        f"- `{name}`{' ' * bool(arm['version'])}{arm['version']}: {arm['what']}.\n"
        for name, arm in report["arms"].items()
    ]
    lines += [f"- `{name}`: not measured.\n" for name in report["missing"]]
    return "".join(lines)


def _table(workload: Mapping[str, Any], on_vllm: bool) -> str:
    p50, p99 = workload["input_tokens"]
    at_a_time, turns = workload["concurrency"], workload["turns"]
    return (
        f"{at_a_time} session{'s' * (at_a_time > 1)} at a time, of {turns} "
        f"call{'s' * (turns > 1)} each; about {p50:,} tokens in a median request "
        f"({p99:,} in the largest), {workload['reply']} in a reply.\n\n"
        + (_VLLM_COLUMNS if on_vllm else _COLUMNS)
        + "".join(
            f"| {' | '.join([arm, *_cells(figures, on_vllm)])} |\n"
            for arm, figures in workload["arms"].items()
        )
        + "".join(
            f"| {arm} | did not start | – | – | – | – | – |\n" for arm in workload["unstarted"]
        )
    )


def _cells(arm: Mapping[str, Any], on_vllm: bool) -> Sequence[str]:
    if "throughput_kept" not in arm:
        return ["–", "–", "–", "–", "–", f"{arm['failed']}"]
    kept, low, high = arm["throughput_kept"]
    first, added, between = arm["first_ms"], arm["added_first_ms"], arm["between_ms"]
    if on_vllm:
        cells = [f"{kept:.2f} ({low:.2f} to {high:.2f})", f"{first[0]:.0f} / {first[1]:.0f}"]
        cells += [f"{arm['first_ratio']:.2f}", f"{between[0]:.2f} / {between[1]:.2f}"]
    else:
        cells = [f"{kept:.1%} ({low:.1%} to {high:.1%})", f"{added[0]:+.1f} / {added[1]:+.1f}"]
        cells += [f"{between[0]:.2f} / {between[1]:.2f}"]
        cells += [f"{arm['rss_mb']:.0f}" if arm["rss_mb"] else "–"]
    exactly = f"{arm['recorded_exactly']:.1%}" if arm["keeps_record"] else "keeps none"
    return [*cells, exactly, f"{arm['failed']}"]


def summary(report: Mapping[str, Any]) -> str:
    """Return the tables, errors, and the arms that are missing with what installs them."""
    text = _tables(report).strip()
    for workload, found in report["workloads"].items():
        for name, arm in found["arms"].items():
            if arm["error"]:
                text += f"\n{workload}, {name}: {arm['error']}"
        text += "".join(f"\n{failure}" for failure in found["unstarted"].values())
    for name, command in report["missing"].items():
        text += f"\n{name} is not installed: {command}"
    return text
