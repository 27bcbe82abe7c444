"""The table in docs/continuation.md is what the probe finds.

``BRIDLE_WRITE_DOCS=1 python -m pytest tests/lineage/test_documented_verdicts.py`` writes it anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.continuation import Continuer, TemplateReport

PAGE = Path(__file__).parents[2] / "docs" / "continuation.md"
BEGIN, END = "<!-- verdicts -->\n", "<!-- end of verdicts -->\n"
HEADINGS = (
    "template",
    "history prefix-preserving",
    "tails local",
    "thinking",
    "arguments re-serialised",
    "parallel calls",
    "late system message",
)


def table(reports: dict[str, TemplateReport]) -> str:
    rows = [HEADINGS, tuple("---" for _ in HEADINGS)]
    rows += [
        (
            f"`{name}`",
            yes(report.prefix_preserving),
            yes(report.tails_local),
            report.thinking,
            yes(report.arguments_reserialised),
            yes(report.parallel_calls) if report.tools else "no tools",
            yes(report.late_system),
        )
        for name, report in sorted(reports.items())
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def yes(value: bool) -> str:
    return "yes" if value else "no"


def test_the_table_in_the_docs_is_what_the_probe_finds(tokenizers: dict[str, Tokenizer]) -> None:
    found = table({name: Continuer(tokenizer).report for name, tokenizer in tokenizers.items()})
    before, _, rest = PAGE.read_text().partition(BEGIN)
    documented, _, after = rest.partition(END)
    if os.environ.get("BRIDLE_WRITE_DOCS"):
        PAGE.write_text(f"{before}{BEGIN}{found}{END}{after}")
    else:
        assert documented == found
