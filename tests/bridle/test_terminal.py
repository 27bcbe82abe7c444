"""A terminal obeys none of the control characters that agents and models write."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from bridle.bench.gallery import EPOCH, stories
from bridle.cli.terminal import Terminal
from bridle.printable import printable
from bridle.proxy.recording.logs import TextLines
from bridle.recipes.demo.progress import progress
from bridle.store.records import CallStatus, Message, RunRecord, ToolCall
from bridle.store.reward import Reward

HOSTILE = (
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]52;c;ZWNobw==\x1b\\ \x9b2J \x08\x08 \x00 \x7f \r "
    "over \u202etxt.exe\u202c"
)
"""CSI, OSC with BEL and with ST, C1's CSI, backspaces, NUL, DEL, a carriage return, an override."""


def controls(text: str) -> set[str]:
    """The control characters in ``text`` but for line breaks, and the overrides of direction."""
    kinds = {one: unicodedata.category(one) for one in set(text) - {"\n"}}
    overrides = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    return {one for one, kind in kinds.items() if kind == "Cc"} | (set(text) & overrides)


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """A store in which every text that an agent, a model or a client may choose is hostile."""
    store = str(tmp_path / "hostile.db")
    for begin in stories(store, RunRecord("run_x", f"rollout{HOSTILE}", EPOCH, name=HOSTILE)):
        named = {"name": f"n{HOSTILE}\nm", "harness": HOSTILE, "group_id": HOSTILE}
        story = begin(run_id="run_x", **named)
        asked = (Message("system", HOSTILE), Message("user", f"{HOSTILE}\n{HOSTILE}"))
        first = story.call(asked, HOSTILE, tool=HOSTILE)
        tool = Message("tool", HOSTILE, tool_call_id=HOSTILE)
        asked = (Message("assistant", HOSTILE, tool_calls=(ToolCall("x", HOSTILE, HOSTILE),)), tool)
        story.call(asked, HOSTILE, parent=first, role=HOSTILE)
        story.call(asked, "", parent=first, status=CallStatus.FAILED, reason=HOSTILE)
        story.writer.add_sync(Reward(story.session.id, HOSTILE, 1.0, EPOCH))
        story.writer.update_session_sync(story.session.id, sealed_at=EPOCH + 900, outcome=HOSTILE)
    return store


@pytest.mark.parametrize(
    "command",
    [
        ("show", "last"),
        ("show", "last", "--text"),
        ("show", "last", "--table"),
        ("sessions",),
        ("top", "--once"),
        ("doctor", "last"),
        ("doctor", "run_x"),
        ("audit",),
        ("kind", "last"),
        ("ablate",),
        ("eval",),
        ("export", "x.jsonl", "--where", f"harness={HOSTILE}"),
        ("show", HOSTILE),
    ],
)
def test_no_command_prints_a_recorded_control_character(
    bridle: Callable[..., Result],
    hostile: str,
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = bridle(*command, "--store", hostile)
    assert done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert controls(done.stdout) == controls(done.stderr) == set()


def test_text_is_shown_with_the_sequences_that_it_has(
    bridle: Callable[..., Result], hostile: str
) -> None:
    shown = bridle("show", "last", "--store", hostile).stdout
    assert "␛[31mred␛[0m" in shown
    assert "\\u202etxt.exe" in shown


def test_json_has_the_text_as_it_was_recorded(bridle: Callable[..., Result], hostile: str) -> None:
    shown = json.loads(bridle("show", "last", "--json", "--store", hostile).stdout)
    assert shown["turns"][0]["reply"]["content"] == HOSTILE
    assert shown["harness"] == HOSTILE


def test_a_name_with_a_line_break_is_one_row(bridle: Callable[..., Result], hostile: str) -> None:
    shown = bridle("sessions", "--store", hostile).stdout
    assert "\u240am  " in shown.splitlines()[1]


@given(st.text())
def test_printable_text_keeps_all_that_is_no_control_character(text: str) -> None:
    shown = printable(text)
    assert controls(shown) <= {"\t"}
    assert [one for one in shown if one in text] or not text or controls(text)
    if not controls(text):
        assert shown == text
    assert not set(printable(text, one_line=True)) & set("\n\t\r")


def test_a_terminal_shows_styles_of_its_own_and_none_of_a_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal = Terminal()
    terminal._force_terminal = True
    terminal._color_system = terminal._color_system or None
    table = Table("heading")
    table.add_row(HOSTILE)
    terminal.print(table, style="bold")
    terminal.print("[bold]:smile:", HOSTILE)
    text = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert controls(text) == set()
    assert "[bold]:smile:" in text


def test_progress_shows_a_note_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    with progress(Terminal(), "sessions", 2) as tick:
        tick(1, HOSTILE)
    assert controls(screen.getvalue()) == set()


def test_a_log_line_is_one_line_without_a_control_character() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        failure = sys.exc_info()
    record = logging.LogRecord("bridle", logging.INFO, "", 0, "call_ended", (), failure)
    record.reason = f"{HOSTILE}\n2026-01-01 info forged"
    first, *trace = TextLines().format(record).split("\n")
    assert controls(first) == set()
    assert "forged" in first
    assert controls("".join(trace)) == set()


def test_a_librarys_warning_is_shown_and_not_obeyed(
    bridle: Callable[..., Result], hostile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bridle("sessions", "--store", hostile)
    assert logging.lastResort is not None
    record = logging.LogRecord("x", logging.WARNING, "", 0, f"it wrote {HOSTILE}", (), None)
    assert controls(logging.lastResort.format(record)) == set()
