"""A session's title is what its user asked for, not what the harness wrote around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridle.bench.gallery import EPOCH, stories
from bridle.diagnosis.notes import sentence
from bridle.diagnosis.pages import session_lines
from bridle.diagnosis.titles import LONGEST, title
from bridle.harnesses.adapters import ADAPTERS
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import Message, Note, RunRecord
from bridle.viewer.app import number_of
from bridle.wrappers import WRAPPERS

BODIES = Path(__file__).parents[1] / "dialects" / "fixtures"
REMINDER = f"<system-reminder>\nAs you answer, use this:\n{'x' * 500}\n</system-reminder>"
CODEX = "<environment_context>\n  <cwd>/tmp</cwd>\n  <shell>bash</shell>\n</environment_context>"
AGENTS = f"# AGENTS.md instructions for /tmp\n\n<INSTRUCTIONS>\n{'be brief' * 99}\n</INSTRUCTIONS>"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["What is in this\n folder?"], "What is in this folder?"),
        ([f"{REMINDER}\n\nFix the tests"], "Fix the tests"),
        ([f"Fix the tests\n{REMINDER}"], "Fix the tests"),
        ([REMINDER, REMINDER, "Fix the tests"], "Fix the tests"),
        ([CODEX, AGENTS], ""),
        ([AGENTS + CODEX + "Fix <b>it</b>"], "Fix <b>it</b>"),
        (["<system-reminder> cut off here", "Fix it"], "Fix it"),
        (["a" * 1000], "a" * LONGEST),
        ([], ""),
    ],
)
def test_a_title_leaves_out_what_the_harness_wrote(texts: list[str], expected: str) -> None:
    assert title(texts) == expected


@pytest.mark.parametrize("file", sorted(BODIES.glob("*.json")), ids=lambda file: file.stem)
def test_a_title_is_what_the_user_asked_in_a_recorded_request_of_each_harness(file: Path) -> None:
    body = json.loads(file.read_text())
    (asked,) = (body[name] for name in ("messages", "input", "contents") if name in body)
    texts = [
        part.get("text", "") if isinstance(part, dict) else part
        for message in reversed(asked)
        if message.get("role") == "user"
        for part in (message.get("content") or message["parts"])
    ]
    assert title(texts) == "say hi"
    # A body is named after its harness, with the way in which it was asked behind it.
    named = file.stem.replace("_", "-")
    harness = next((name for name in WRAPPERS if named.startswith(name)), None)
    assert title(texts, harness) == "say hi"


def test_each_adapter_declares_what_its_harness_writes() -> None:
    known = {name: str(ADAPTERS.reference(name)) for name in ADAPTERS.names()}
    ours = [name for name, place in known.items() if place.startswith("bridle.")]
    assert sorted(WRAPPERS) == sorted(ours)


def test_a_harness_keeps_what_only_another_one_writes() -> None:
    assert title(["<skill>Bake</skill> it"], "claude-code") == "<skill>Bake</skill> it"
    assert title(["<skill>Bake</skill> it"], "codex") == "it"
    assert title(["<skill>Bake</skill> it"], "a harness of others") == "it"


def test_a_note_is_a_sentence_or_its_name_in_words() -> None:
    dropped = sentence(Note("tool_dropped", "web_search"))
    assert dropped == "web_search is not a function, so it was not offered to the model"
    assert sentence(Note("new_note", "x")) == "new note: x"
    assert sentence(Note("new_note")) == "new note"


@pytest.mark.parametrize(
    "asked",
    [
        (Message("user", CODEX), Message("user", "Fix the tests")),
        (
            Message("user", "an earlier question"),
            Message("assistant", "an answer"),
            Message("user", "Fix the tests"),
        ),
        (
            Message(
                "user",
                [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Fix the tests"}],
            ),
        ),
        (Message("user", "Fix the tests"), Message("user", CODEX)),
    ],
)
def test_the_last_message_of_the_first_call_gives_the_title(
    tmp_path: Path, asked: tuple[Message, ...]
) -> None:
    store = str(tmp_path / "titles.db")
    for begin in stories(store, RunRecord("run_x", "rollout", EPOCH)):
        story = begin(run_id="run_x")
        story.call((Message("user", "A title for: it"),), "It", side=True)
        first = story.call((Message("system", "You code."), *asked), "Done.")
        story.call((Message("user", "And now this"),), "Done, too.", parent=first)
        begin(run_id="run_x")
    with Reader(store) as reader:
        empty, line = session_lines(reader, SessionFilter(), number=number_of(reader), limit=5)
    assert (empty.title, line.title) == ("", "Fix the tests")
