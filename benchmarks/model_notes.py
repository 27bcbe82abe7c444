"""The notes on model families as a page: what is exact, the parsers, and peculiarities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = """# Model families

Each family's genuine chat template was led through the proxy: eight calls in each of four dialects,
with reasoning dropped and arguments written anew by the client. `bridle bench models --table
docs/models.md` writes this page.

- **rows**, **breaks**: branches a session and breaks in all sessions, with exact continuation.
- **outside**: prompts that differ from the whole rendering elsewhere than in what was sampled.
- **rendered breaks**: the same sessions with `continuation = rendered`.
- **tools**: whether the template shows calls and results, lets them vanish, or refuses them.
- A family marked * has its own template on the nearest tokenizer that the registries have.

| family | rows | breaks | outside | rendered breaks | tools | tool parser | reasoning parser |
|---|---|---|---|---|---|---|---|
"""


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures of :func:`bridle.bench.models.measure` as Markdown."""
    rows = [
        f"| {name} | not fetched | | | | | | |\n" for name in found if "not_fetched" in found[name]
    ]
    found = {name: figures for name, figures in found.items() if "not_fetched" not in figures}
    rows += [
        f"| {name}{'*' * figures['stand_in']} | {figures['exact']['rows_per_session']:.2f} "
        f"| {figures['exact']['breaks']} | {figures['outside_differences']} "
        f"| {figures['rendered']['breaks']} | {figures['tools']} "
        f"| {figures['parsers']['tool'] or 'none'} "
        f"| {figures['parsers']['reasoning'] or 'none'} |\n"
        for name, figures in found.items()
    ]
    notes = [
        f"\n## {name}\n\n" + "".join(f"- {reason}\n" for reason in figures["reasons"])
        for name, figures in found.items()
    ]
    return _HEAD + "".join(rows) + "".join(notes)
