"""Every query of docs/sql.md, with Python's ``sqlite3`` and with ``psql``, on recorded calls."""

import csv
import io
import os
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.audit import audit
from bridle.store.declaration import stored
from bridle.store.operations.copying import copy_store
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.reward import Reward
from bridle.store.schema.views import turn_columns
from bridle.store.trained import TrainedSpan

PAGE = Path(__file__).parents[2] / "docs" / "sql.md"
QUERIES = dict(
    re.findall(r"^## (.+?)$(?:(?!^## ).)*?^```sql\n(.+?)^```", PAGE.read_text(), re.M | re.S)
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def script(request):
    last = request.messages[-1]
    if last["role"] == "tool":
        return ScriptedReply("The sum is " + last["content"] + ".")
    if "long" in last["content"]:
        return ScriptedReply("one two three four five six", end=False)
    if request.tools:
        return ScriptedReply(tool_calls=(ScriptedCall("add", {"a": 1, "b": 2}),))
    return ScriptedReply("Yes.")


class Agent:
    """A harness that adds numbers."""

    def __init__(self, http, name, **session):
        self.http, self.name = http, name
        opened = http.post("/bridle/v1/sessions", json={"name": name, **session})
        assert opened.status_code == 201, opened.text
        self.id = opened.json()["id"]
        self.messages = []

    def ask(self, content, **fields):
        self.messages.append({"role": "user", "content": content})
        return self.call(**fields)

    def call(self, **fields):
        body = {"model": "policy", "messages": self.messages, **fields}
        answer = self.http.post(f"/s/{self.name}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        self.messages.append({key: value for key, value in reply.items() if value})
        return reply

    def add(self, result, **fields):
        reply = self.ask("1 + 2?", tools=TOOLS, **fields)
        called = reply["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": called, "content": result})
        self.call(tools=TOOLS, **fields)

    def reward(self, value):
        reward = {"name": "solved", "value": value}
        self.http.post(f"/bridle/v1/sessions/{self.id}/rewards", json=reward).raise_for_status()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sql")
    store = folder / "bridle.db"
    train_tokenizer(folder / "model", ["The sum is three. one two three four five six Yes."] * 20)
    task = {"suite": "sums", "split": "train", "id": "1", "payload": {}}
    with (
        ScriptedEngine(folder / "model", script, served_model_name="policy") as engine,
        ProxyServer(
            ProxySettings(engine.base_url, str(store), tokenizer_dir=folder / "model")
        ) as proxy,
        httpx.Client(base_url=proxy.base_url, timeout=30, trust_env=False) as http,
    ):
        before = Agent(http, "sums-1", harness="codex", task=task)
        before.add("error: no such tool", temperature=0.7)
        before.reward(0.0)
        http.put("/bridle/v1/policy", json={"version": 1}).raise_for_status()
        after = Agent(http, "sums-2", harness="codex", task=task)
        after.add("3", temperature=0.7)
        after.ask("thanks", temperature=0.7)
        after.reward(0.5)
        after.reward(1.0)
        other = Agent(http, "talk", harness="qwen")
        other.ask("something long", max_tokens=3)
        other.ask("and now?")
    with Reader(str(store)) as reader:
        for _ in audit(reader):
            pass
    return store


def with_sqlite(store, query):
    with closing(sqlite3.connect(store)) as connection:
        return [[plain(value) for value in row] for row in connection.execute(query)]


def with_psql(url, query):
    done = subprocess.run(
        ["psql", "-X", "-q", "-t", "--csv", "-v", "ON_ERROR_STOP=1", url, "-c", query],
        check=True,
        capture_output=True,
        text=True,
    )
    return [[plain(value) for value in row] for row in csv.reader(io.StringIO(done.stdout))]


def plain(value):
    """A value as both programs show it: numbers as numbers, NULL as nothing."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value or ""


CALLED = '[{"id":"%s","name":"add","arguments":"{\\"a\\": 1, \\"b\\": 2}","engine_id":"%s"}]'

ANSWERS = {
    "Mean reward by harness and policy version": [
        ["codex", 0, "solved", 0, 1],
        ["codex", 1, "solved", 1, 1],
    ],
    "The longest sessions": [["sums-2", 3], ["sums-1", 2], ["talk", 2]],
    "All calls of one tool and their results": [
        [1, '{"a": 1, "b": 2}', "error: no such tool"],
        [1, '{"a": 1, "b": 2}', 3],
    ],
    "Replies cut by length": [["talk", 1, 3, 3]],
    "Which temperature the calls used": [[0.7, "", 5], ["", "", 2]],
    "Breaks by reason": [["tools_changed", 1, 1]],
    "A session as a readable transcript": [
        [1, "user", "1 + 2?", "", ""],
        [1, "assistant", "", "", "add"],
        [2, "tool", "error: no such tool", "", ""],
        [2, "assistant", "The sum is error: no such tool.", "", ""],
    ],
    "Sessions where a tool failed": [["sums-1", 1]],
    "One task before and after training": [[0, 1, 0, 0], [1, 1, 1, 1]],
}


def check(question, rows):
    if question == "Tokens by fate":
        fates = {(row[0], row[1]): row[2] for row in rows}
        assert fates["trainable", ""] == sum(fates.values()) > 30
        return
    if question == "The longest sessions":
        assert all(row[2] > 0 and row[3] > row[2] for row in rows)
        rows = [row[:2] for row in rows]
    if question == "A session as a readable transcript":
        assert re.fullmatch(re.escape(CALLED).replace("%s", r"[\w-]+"), rows[1][4])
        rows[1][4] = "add"
    if question == "All calls of one tool and their results":
        rows = sorted(rows, key=str)  # the order of session ids is the collation's
    assert rows == ANSWERS[question]


def test_the_page_answers_ten_questions():
    assert len(QUERIES) == 10
    assert {*ANSWERS, "Tokens by fate"} == set(QUERIES)


@pytest.mark.parametrize("question", QUERIES)
def test_a_query_answers_on_sqlite(recorded, question):
    check(question, with_sqlite(recorded, QUERIES[question]))


@pytest.mark.postgres
def test_every_query_answers_the_same_with_psql(recorded, postgres):
    url = postgres.empty_database()
    copy_store(str(recorded), url)
    for question, query in QUERIES.items():
        rows = with_psql(url, query)
        check(question, [list(row) for row in rows])
        assert rows == with_sqlite(recorded, query)


def declared_columns():
    """The tables of columns, as the declarations give them."""
    owned = {"sessions": stored(SessionRecord), "rewards": stored(Reward)}
    owned["trained_spans"] = stored(TrainedSpan)
    found = {"turns": [(one.name, one.meaning) for one in turn_columns()]} | {
        table: [(one.name, one.fact.meaning) for one in facts] for table, facts in owned.items()
    }
    parts = []
    for table, columns in found.items():
        rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in columns)
        parts.append(f"| column of `{table}` | meaning |\n|---|---|\n{rows}")
    return "\n".join(parts)


def test_the_page_has_the_declared_columns():
    opening, closing = "<!-- columns -->\n", "<!-- end of columns -->\n"
    page = PAGE.read_text()
    before, rest = page.split(opening)
    wanted = opening.join((before, f"\n{declared_columns()}\n{closing}{rest.split(closing)[1]}"))
    if "BRIDLE_WRITE_DOCS" in os.environ:
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted


def test_the_view_has_the_declared_columns(recorded):
    with closing(sqlite3.connect(recorded)) as connection:
        columns = connection.execute("SELECT name FROM pragma_table_info('turns')")
        assert [name for (name,) in columns] == [one.name for one in turn_columns()]


@pytest.mark.parametrize("view", ["messages", "tool_calls"])
def test_every_column_that_the_page_names_is_there(recorded, view):
    line = next(text for text in PAGE.read_text().splitlines() if text.startswith(f"| `{view}`"))
    named = set(re.findall(r"`(\w+)`", line.split("|")[3])) - {"request", "reply"}
    with closing(sqlite3.connect(recorded)) as connection:
        columns = connection.execute("SELECT name FROM pragma_table_info(?)", (view,))
        assert named == {name for (name,) in columns}


def test_the_store_page_reads_a_call_to_the_bit(recorded):
    page = (PAGE.parent / "store.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    shown = re.sub(r"^( +)(reader\..*?)( +#.*)$", r"\1found.append(\2)", snippet, flags=re.M)
    with Reader(str(recorded)) as reader:
        session = reader.session_by_name("sums-1")
        calls = reader.calls(session.id)
    values = {"session_id": session.id, "found": []}
    exec(shown.replace("runs/bridle.db", str(recorded)), values)  # noqa: S102 - the page's own
    assert len(values["found"]) == 3 * len(calls) == 6
    prompt, logprobs, body = values["found"][:3]
    assert (str(prompt.dtype), str(logprobs.dtype)) == ("uint32", "float32")
    assert len(logprobs) == calls[0].sampled_tokens
    assert b"1 + 2?" in body
