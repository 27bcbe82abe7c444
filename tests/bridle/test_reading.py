"""Commands that look at a store: sessions, show, reward, export, audit."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import datasets
import httpx
import openai
import pytest
from click.testing import Result
from openai.types.chat import ChatCompletionMessageParam
from rich.color import ColorSystem

from bridle import export
from bridle.cli.terminal import out
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord, SessionRecord
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer

Bridle = Callable[..., Result]


def test_sessions_lists_what_was_recorded(bridle: Bridle, store: str, recorded: str) -> None:
    result = bridle("sessions", "--store", store, "--json")
    (row,) = json.loads(result.stdout)
    assert row["name"] == recorded
    assert row["calls"] == 2
    assert row["observed_tokens"] > row["sampled_tokens"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("sessions",),
        ("show", "last"),
        ("reward", "last", "1"),
        ("kind", "last", "1", "side"),
        ("audit",),
        ("export", "rows.jsonl"),
        ("forget", "last", "--yes"),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.damages_store
def test_a_store_that_a_newer_bridle_migrated_is_refused_in_a_line(
    bridle: Bridle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = str(tmp_path / "newer.db")
    migrate(store)
    with Writer(store) as writer:
        writer.add_sync(SessionRecord(id="ses_newer", created_at=1.0))
    with closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    refused = bridle(*arguments, "--store", store)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("bridle: the store is a newer Bridle's: its schema is 9999")
    with Reader(store) as reader:
        assert reader.session("ses_newer").outcome is None
        assert reader.rewards("ses_newer") == []


def test_show_tells_every_turn_and_what_it_continues(
    bridle: Bridle, store: str, recorded: str
) -> None:
    shown = json.loads(bridle("show", recorded, "--store", store, "--json").stdout)
    first, second = shown["turns"]
    assert (first["continues"], second["continues"]) == (None, 1)
    assert first["said"] == 'add({"a": 2, "b": 3})'
    assert second["said"] == "The answer is 5."
    assert second["new_tokens"] < first["new_tokens"], "the history is not recorded twice"
    assert second["break_reason"] is None


def test_show_and_metrics_tell_breaks_by_reason_and_show_replies_under_a_grammar(
    bridle: Bridle, store: str, proxy_url: str
) -> None:
    opened = f"{proxy_url}/bridle/v1/sessions"
    made = httpx.post(opened, json={"continuation": "rendered"}, timeout=60).json()
    chat = f"{proxy_url}/s/{made['id']}/v1/chat/completions"

    def say(messages: list[dict[str, str]], **more: object) -> str:
        reply = httpx.post(chat, json={"model": "m", "messages": messages, **more}, timeout=60)
        return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])

    # In "rendered" mode a system prompt that changes is a break; nothing is kept of the ids.
    first = say([{"role": "system", "content": "one"}, {"role": "user", "content": "two?"}])
    history = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": first}]
    changed = [{"role": "system", "content": "other"}, *history, {"role": "user", "content": "x"}]
    say(changed)
    with closing(sqlite3.connect(store)) as database, database:
        # An engine with grammars makes this note; the scripted one has none.
        database.execute(
            "UPDATE calls SET notes = ? WHERE break_reason IS NOT NULL",
            (json.dumps([{"name": "constrained_by_grammar", "detail": "response_format"}]),),
        )

    whole = bridle("show", made["id"], "--store", store).stdout
    assert "break: its tokens do not continue turn 1: system_changed" in whole
    shown = bridle("show", made["id"], "--table", "--store", store)
    assert "break: system_changed" in " ".join(shown.stdout.split())
    assert "breaks on (rendered mode): 1 system_changed" in shown.stdout
    assert "noted in 1 call: a grammar limited the reply (response_format)" in shown.stdout
    assert "constrained" in shown.stdout
    one, two = json.loads(bridle("show", made["id"], "--store", store, "--json").stdout)["turns"]
    assert (one["break_reasons"], two["break_reasons"]) == ([], ["system_changed"])
    assert (one["constrained"], two["constrained"]) == (False, True)
    metrics = httpx.get(f"{proxy_url}/metrics").text
    assert 'bridle_breaks_total{reason="system_changed"} 1.0' in metrics


def test_rewards_of_turns_are_told_beside_the_session_s_own(
    bridle: Bridle, store: str, recorded: str
) -> None:
    for given in (("1.0",), ("0", "--turn", "1"), ("0.5", "--turn", "2"), ("0.25", "--turn", "2")):
        assert bridle("reward", recorded, *given, "--store", store).exit_code == 0
    (row,) = json.loads(bridle("sessions", "--store", store, "--json").stdout)
    assert row["rewards"] == {"reward": 1.0}
    told = bridle("show", recorded, "--store", store).stdout.splitlines()[-3:]
    assert told == [
        "reward reward = 1",
        "reward reward = 0 (turn 1)",
        "reward reward = 0.25 (turn 2)",
    ]
    shown = json.loads(bridle("show", recorded, "--store", store, "--json").stdout)
    assert shown["rewards"] == {"reward": 1.0}
    assert [turn["rewards"] for turn in shown["turns"]] == [{"reward": 0.0}, {"reward": 0.25}]


def test_only_the_reply_and_the_rewards_are_cut_at_80_columns(
    bridle: Bridle, store: str, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("correct", 0.25), ("a_long_name_of_a_reward", 21)):
        bridle("reward", recorded, value, "--name", name, "--store", store)
    monkeypatch.setattr(out, "width", 80)
    shown = bridle("show", recorded, "--table", "--store", store).stdout.splitlines()[2:5]
    headings = ["turn", "after", "new", "sampled", "finish", "status", "reply"]
    assert shown[0].split() == headings
    assert all(len(row.split()) >= len(headings) for row in shown[1:])
    for row in shown:
        assert len(row) <= 80
        assert "…" not in row[:-1]


@pytest.mark.parametrize(("width", "left_out"), [(80, ["sampled"]), (120, [])])
def test_a_list_of_sessions_has_task_model_and_time_and_names_what_it_leaves_out(
    bridle: Bridle,
    store: str,
    proxy_url: str,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    left_out: list[str],
) -> None:
    made = httpx.post(f"{proxy_url}/bridle/v1/sessions", json={"harness": "codex"}).json()
    question = "How many lamps are there? " * 10
    asked = {"model": "m", "messages": [{"role": "user", "content": question}]}
    httpx.post(f"{proxy_url}/s/{made['id']}/v1/chat/completions", json=asked).raise_for_status()
    bridle("reward", made["id"], 1, "--name", "a_long_name_of_a_reward", "--store", store)
    monkeypatch.setattr(out, "width", width)
    heading, row, about, *rest = bridle("sessions", "--store", store).stdout.splitlines()
    wanted = ["session", "started", "outcome", "calls", "sampled", "took", "rewards"]
    assert heading.split() == [name for name in wanted if name not in left_out]
    assert row.startswith(made["id"])
    assert " ms " in row
    assert about.startswith("  codex · policy · How many lamps are there? How many")
    assert rest == [f"left out at {width} columns: {name}" for name in left_out]
    assert max(map(len, (heading, row, about))) <= width


def test_a_conversation_is_shown_whole(bridle: Bridle, store: str, recorded: str) -> None:
    shown = bridle("show", recorded, "--store", store).stdout
    first, second = shown.split("\nturn ")[1:]
    assert first.startswith("1  complete · policy · ")
    assert "\nuser\n  What is 2 plus 3?\nassistant\n  add {\n" in first
    assert "\ntool call_" in second
    assert "\n  5\nassistant\n  The answer is 5.\n" in second
    one = bridle("show", recorded, "--turn", 2, "--store", store).stdout
    assert "The answer is 5." in one
    assert "What is 2 plus 3?" not in one
    text = bridle("show", recorded, "--text", "--store", store).stdout
    assert text.startswith("user\n  What is 2 plus 3?\n")
    assert "complete" not in text
    missing = bridle("show", recorded, "--turn", 3, "--store", store)
    assert missing.exit_code == 1
    assert missing.stderr.endswith("has turns 1 to 2, not 3\n")
    assert bridle("show", recorded, "--table", "--text", "--store", store).exit_code == 2


def test_a_long_system_prompt_is_folded_unless_all_is_asked_for(
    bridle: Bridle, store: str, proxy_url: str
) -> None:
    prompt = "You are careful.\n" * 40
    client = openai.OpenAI(base_url=f"{proxy_url}/v1", api_key="unused")
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": prompt},
        {"role": "user", "content": "What is 2 plus 3?"},
    ]
    client.chat.completions.create(model="policy", messages=messages)
    for more in ((), ("--text",)):
        shown = bridle("show", "last", *more, "--store", store).stdout
        assert shown.count("You are careful.") < 6
        assert f"… ({len(prompt):,} characters; --full shows all)\nuser\n  What is 2" in shown
        whole = bridle("show", "last", *more, "--full", "--store", store).stdout
        assert whole.count("You are careful.") == 40


def test_statuses_have_colours_in_a_terminal(
    bridle: Bridle, store: str, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "_force_terminal", True)
    monkeypatch.setattr(out, "_color_system", ColorSystem.STANDARD)
    monkeypatch.setattr(out, "no_color", False)
    assert "\x1b[32mcomplete\x1b[0m" in bridle("show", recorded, "--store", store).stdout


def test_status_shows_every_engine_whole_at_80_columns(
    bridle: Bridle, proxy_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 80)
    table = bridle("status", "--proxy", proxy_url).stdout.splitlines()[1:]
    assert table[0].split()[-1] == "ejections"
    assert "…" not in "".join(table)


def test_what_is_piped_has_120_columns() -> None:
    assert out.width >= 120


def test_show_finds_a_session_by_name_beginning_or_last(
    bridle: Bridle, store: str, recorded: str
) -> None:
    known = json.loads(bridle("show", recorded, "--store", store, "--json").stdout)["id"]
    for wanted in (known, known[:10], "last"):
        found = json.loads(bridle("show", wanted, "--store", store, "--json").stdout)
        assert found["id"] == known


def test_a_session_that_is_not_there_is_named_in_the_error(
    bridle: Bridle, store: str, recorded: str
) -> None:
    result = bridle("show", "nonesuch", "--store", store)
    assert result.exit_code == 1
    assert "nonesuch" in result.stderr


@pytest.mark.parametrize("command", ["sessions", "audit", "ablate", "export", "sft"])
def test_a_run_that_the_store_does_not_have_is_refused_in_a_line(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path, command: str
) -> None:
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run_1", "train", 1.0))
    path = tmp_path / "x.jsonl"
    own = {"export": [path], "sft": ["--policy", tmp_path, "--out", tmp_path / "tuned"]}
    refused = bridle(command, *own.get(command, []), "--run", "nope", "--store", store)
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert refused.stderr == "bridle: no run 'nope' in this store; newest: run_1\n"
    assert not path.exists()


def test_a_filter_that_fits_no_session_says_so(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run_1", "train", 1.0))
    for command in (("sessions", "--run", "run_1"), ("audit", "--run", "run_1")):
        told = bridle(*command, "--store", store)
        assert told.exit_code == 0, command
        assert told.stdout.endswith("No session matches.\n"), command
    path = tmp_path / "x.jsonl"
    for filters in (
        ("--run", "run_1"),
        ("--set", "harness=zz"),
        ("--eval-share", "0.5", "--run=run_1"),
    ):
        refused = bridle("export", path, *filters, "--store", store)
        assert (refused.exit_code, refused.stderr) == (1, "bridle: no session matches\n"), filters
    poor = bridle("export", path, "--min-reward", "1", "--store", store)
    said = "bridle: no session matches; left out: 1 session_without_reward\n"
    assert (poor.exit_code, poor.stderr) == (1, said)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("x.")]
    none = bridle("ablate", "--harness", "zz", "--store", store)
    assert (none.exit_code, none.stderr) == (1, "bridle: no session matches\n")


def test_a_store_without_a_session_says_so(bridle: Bridle, store: str) -> None:
    for command in ("sessions", "audit"):
        assert bridle(command, "--store", store).stdout == "The store holds no session yet.\n"
    assert json.loads(bridle("sessions", "--store", store, "--json").stdout) == []


@pytest.mark.parametrize("command", ["sessions", "ablate"])
@pytest.mark.parametrize("limit", [0, -1])
def test_at_least_one_session_is_asked_for(
    bridle: Bridle, store: str, recorded: str, command: str, limit: int
) -> None:
    refused = bridle(command, "--limit", limit, "--store", store)
    assert refused.exit_code == 2
    assert "Invalid value for '--limit'" in refused.stderr


def test_a_store_that_is_not_there_is_not_made_by_looking(bridle: Bridle, tmp_path: Path) -> None:
    missing = tmp_path / "none.db"
    result = bridle("sessions", "--store", missing)
    assert result.exit_code == 1
    assert "no store" in result.stderr
    assert not missing.exists()


def test_a_reward_shows_with_its_session(bridle: Bridle, store: str, recorded: str) -> None:
    assert bridle("reward", recorded, "0.5", "--store", store).exit_code == 0
    assert bridle("reward", recorded, "1", "--turn", "2", "--store", store).exit_code == 0
    assert bridle("reward", recorded, "1", "--turn", "3", "--store", store).exit_code == 1
    with sqlite3.connect(store) as database:
        rows = database.execute("SELECT value, turn FROM rewards ORDER BY value").fetchall()
    assert rows == [(0.5, None), (1.0, 2)]


def test_an_exported_conversation_has_its_turns_and_tools(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    assert bridle("export", path, "--store", store).exit_code == 0
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert [message["role"] for message in line["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert line["tools"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet"])
def test_the_library_exports_what_the_command_does(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path, name: str
) -> None:
    typed, called = tmp_path / "typed" / name, tmp_path / "called" / name
    called.parent.mkdir()
    assert bridle("export", typed, "--store", store).exit_code == 0
    assert export(called, store=store).sessions == 1
    assert called.read_bytes() == typed.read_bytes()


def test_exported_tokens_load_with_datasets_and_mask_only_what_was_sampled(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.parquet"
    assert bridle("export", path, "--store", store).exit_code == 0
    rows = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    (row,) = list(rows)
    (listed,) = json.loads(bridle("sessions", "--store", store, "--json").stdout)
    assert sum(row["mask"]) == listed["sampled_tokens"]
    assert len(row["token_ids"]) == listed["sampled_tokens"] + listed["observed_tokens"]


def test_a_completed_prompt_is_no_conversation(
    bridle: Bridle, store: str, proxy_url: str, tmp_path: Path
) -> None:

    def complete(prompt: str | list[str] | list[int]) -> list[int]:
        ask = {"model": "m", "prompt": prompt, "return_token_ids": True}
        told = httpx.post(f"{proxy_url}/s/sums/v1/completions", json=ask, timeout=60)
        (choice,) = told.raise_for_status().json()["choices"]
        return [*choice["prompt_token_ids"], *choice["token_ids"]]

    ids = complete("What is 2 plus 3?")
    complete(["What is 3 plus 3?"])
    complete([*ids, 5])

    def export(form: str, *options: str) -> tuple[list[dict[str, object]], dict[str, int]]:
        path = tmp_path / "out.jsonl"
        asked = ("--force", "--format", form, *options, "--store", store, "--json")
        told = bridle("export", path, *asked)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return lines, json.loads(told.stdout)["left_out"]

    for form in ("chat", "trl", "sharegpt", "adp", "atif"):
        assert export(form) == ([], {"prompt_without_messages": 3}), form
    for options in ((), ("--set", "deduplicate=true")):
        lines, left_out = export("trl-prompt-completion", *options)
        assert lines == [
            {"prompt": "What is 2 plus 3?", "completion": "The answer is unknown."},
            {"prompt": "What is 3 plus 3?", "completion": "The answer is unknown."},
        ]
        assert left_out == {"prompt_not_text": 1}


def test_open_is_the_outcome_of_sessions_that_are_not_sealed(
    bridle: Bridle, store: str, recorded: str, proxy_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"

    def taken(outcome: str) -> int:
        asked = (
            "export",
            path,
            "--force",
            "--set",
            f"outcome={outcome}",
            "--store",
            store,
            "--json",
        )
        return int(json.loads(bridle(*asked).stdout or '{"sessions": 0}')["sessions"])

    assert (taken("open"), taken("completed")) == (1, 0)
    httpx.post(f"{proxy_url}/bridle/v1/sessions/{recorded}/seal", json={}).raise_for_status()
    assert (taken("open"), taken("completed")) == (0, 1)


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("min_reward=1", "--set min_reward: use --min-reward"),
        ("rules.turn_reward=step", "--set rules: use --rules"),
        ("reward_nam=x", "there is no setting 'reward_nam'"),
    ],
)
def test_a_condition_that_an_export_does_not_take_is_refused_in_a_line(
    bridle: Bridle, store: str, tmp_path: Path, assignment: str, reason: str
) -> None:
    refused = bridle("export", tmp_path / "x.jsonl", "--set", assignment, "--store", store)
    assert refused.exit_code == 2
    assert reason in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_an_export_without_a_format_is_refused(bridle: Bridle, store: str, recorded: str) -> None:
    for name in ("out.txt", "."):
        refused = bridle("export", name, "--store", store)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"bridle: {name} names no format")


@pytest.mark.parametrize(("name", "form"), [("x.jsonl", "tokens"), ("x.parquet", "chat")])
def test_a_file_is_not_named_for_what_it_does_not_hold(
    bridle: Bridle, store: str, recorded: str, tmp_path: Path, name: str, form: str
) -> None:
    refused = bridle("export", tmp_path / name, "--format", form, "--store", store)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"bridle: {name} is no name for {form}")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / name).exists()


def test_audit_accounts_for_every_token(bridle: Bridle, store: str, recorded: str) -> None:
    result = bridle("audit", "--store", store, "--bodies", "--json")
    table = json.loads(result.stdout)
    assert result.exit_code == 0
    assert table["captured"] == table["trainable"] > 0
    assert table["violations"] == []


@pytest.mark.damages_store
@pytest.mark.parametrize(
    "damage",
    ["DELETE FROM spans WHERE choice = 0", "UPDATE calls SET sampled_tokens = 1"],
)
def test_audit_fails_on_a_damaged_store(
    bridle: Bridle, store: str, recorded: str, damage: str
) -> None:
    with sqlite3.connect(store) as database:
        database.execute(damage)
    result = bridle("audit", "--store", store)
    assert result.exit_code == 1
    assert "sampled_differs" in result.stdout


def test_a_store_that_cannot_be_read_costs_one_line(bridle: Bridle, tmp_path: Path) -> None:
    refused = bridle("sessions", "--store", tmp_path)
    assert refused.exit_code == 1
    assert "is a folder, not a store" in refused.stderr
    assert refused.stderr.count("\n") == 1


UNREACHABLE = "postgresql://someone:hunter2@127.0.0.1:1/x"


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (UNREACHABLE, "Connection refused"),
        ("mysql://u:hunter2@h/d", "not mysql://"),
        ("postgresql://u:hunter2@h:port/d", "URL cannot be read"),
        ("sqlite://bridle.db", "names a file"),
        ("sqlite://u:hunter2@h/bridle.db", "names a file"),
        ("sqlite://", "names a file"),
        ("sqlite:///:memory:", "names a file"),
        ("/proc/none/bridle.db", "the store cannot be made"),
        ("/", "is a folder, not a store"),
    ],
)
def test_a_store_that_cannot_be_made_is_told_without_a_traceback_or_its_password(
    bridle: Bridle, store: str, address: str, told: str
) -> None:
    engine = ("--upstream", "http://127.0.0.1:1", "--port", "0")
    commands = [("proxy", *engine, "--store", address), ("export-db", address, "--store", store)]
    for command in commands:
        refused = bridle(*command)
        assert refused.exit_code == 1, command
        assert refused.stderr.startswith("bridle: ")
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr
        assert "hunter2" not in refused.output


def test_a_terminal_that_is_not_utf_8_is_told_what_it_can_show_and_programs_get_json(
    recorded: str, store: str
) -> None:
    def said(*arguments: str) -> bytes:
        return subprocess.run(
            [sys.executable, "-m", "bridle", *arguments, "--store", store],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout

    rename = "UPDATE sessions SET harness = 'Füchslein' WHERE name = ?"
    with sqlite3.connect(store) as database:
        database.execute(rename, (recorded,))
    assert b"F?chslein" in said("sessions")
    assert b"F?chslein" in said("show", recorded)
    assert "Füchslein" in {row["harness"] for row in json.loads(said("sessions", "--json"))}


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_file_that_cannot_be_written_costs_one_line(
    bridle: Bridle, recorded: str, store: str, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    refused = bridle("export", tmp_path / name, "--store", store)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("bridle: ")
    assert str(tmp_path / name) in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_brackets_in_names_and_errors_are_no_markup(
    bridle: Bridle, store: str, proxy_url: str, tmp_path: Path
) -> None:
    harness = "[/lamp] [red]"
    made = httpx.post(f"{proxy_url}/bridle/v1/sessions", json={"harness": harness}).json()
    reward = ("reward", made["id"], "0.5", "--name", "[/x]", "--store", store)
    assert "[/x] = 0.5" in bridle(*reward).stdout
    listed = bridle("sessions", "--store", store)
    assert listed.exit_code == 0
    assert "[/lamp]" in listed.stdout
    assert harness in bridle("show", made["id"], "--store", store).stdout
    assert "at [/x]:" in bridle("sessions", "--store", "[/x]").stderr


def test_a_session_without_a_call_is_shown(bridle: Bridle, store: str, proxy_url: str) -> None:
    made = httpx.post(f"{proxy_url}/bridle/v1/sessions", json={}).json()
    shown = bridle("show", made["id"], "--store", store)
    assert shown.exit_code == 0
    assert "0 calls" in shown.stdout
