"""docs/security.md has the declared attempts, and what stays open with its reason."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from security.attempts import ATTEMPTS, SIGNS, Attempt

PAGE = Path(__file__).parents[2] / "docs/security.md"
CLASSES = {
    "caches",
    "cleanup",
    "environments",
    "files",
    "keys",
    "processes",
    "signals",
    "sockets",
    "task folders",
    "verifier inputs",
}
CELLS = {
    "users/ordinary": "users for sessions of a process that is not root",
    "container": "containers",
}
"""The cells in which an attempt succeeds or ends its own session, as the page names them."""


def held_in(one: Attempt) -> str:
    if one.alone_in:
        ended = (f"in {CELLS[cell]} {why}" for cell, why in one.alone_in.items())
        return f"all; its own session ends: {'; '.join(ended)}"
    if one.only:
        return f"`{'`, `'.join(one.only)}`: {one.why_only}"
    if one.kept_open:
        return "all but " + ", ".join(CELLS[cell] for cell in one.kept_open)
    return "all"


def table() -> str:
    rows = ["| class | the agent tries to | success would be that | held in |", "|---|---|---|---|"]
    for one in sorted(ATTEMPTS.values(), key=lambda one: one.kind):
        tries = (one.tries[0].lower() + one.tries[1:]).rstrip(".")
        rows.append(f"| {one.kind} | {tries} | {SIGNS[one.sign]} | {held_in(one)} |")
    return "\n".join(rows)


def what_is_open() -> str:
    """Return a line for each reason, with the attempts that succeed for it."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for one in ATTEMPTS.values():
        for reason in one.kept_open.values():
            reasons[reason].append(one.tries.rstrip("."))
    return "\n".join(
        f"- {reason[0].upper()}{reason[1:]}: {'; '.join(tries)}."
        for reason, tries in reasons.items()
    )


@pytest.mark.parametrize(("name", "made"), [("attempts", table), ("open", what_is_open)])
def test_the_page_has_what_is_declared(name: str, made: object) -> None:
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    page = PAGE.read_text()
    before, rest = page.split(opening)
    text = made()  # type: ignore[operator]
    wanted = opening.join((before, f"\n{text}\n\n{closing}{rest.split(closing)[1]}"))
    if "BRIDLE_WRITE_DOCS" in os.environ:
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "BRIDLE_WRITE_DOCS=1 writes it"


def test_there_are_attempts_of_every_class_and_each_exception_has_a_reason() -> None:
    assert len(ATTEMPTS) >= 40
    assert {one.kind for one in ATTEMPTS.values()} == CLASSES
    for one in ATTEMPTS.values():
        assert bool(one.only) == bool(one.why_only)
        assert set(one.kept_open) <= set(CELLS), one.name
        assert set(one.alone_in) <= set(CELLS), one.name
        assert all((*one.kept_open.values(), *one.alone_in.values()))
