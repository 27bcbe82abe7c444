import json

import datasets
import numpy as np
import pytest

from bridle.reconstruct.exports.chat_jsonl import export_chat
from bridle.reconstruct.exports.parquet import export_parquet
from bridle.reconstruct.exports.selection import Selection
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import CallKind, CallStatus, TaskRecord
from bridle.store.reward import Reward
from support.parquet import read_samples

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def calling(name):
    call = {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"role": "assistant", "reasoning": "hm", "tool_calls": [call]}


def shown(name):
    """The message as chat templates read it."""
    message = calling(name)
    return {"reasoning_content": message.pop("reasoning")} | message


def result(name):
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": "42"}


def state(tail, base=None, tools=None, choice=0, choices=None):
    said = {"tail": tail, "lineage": {"base": base, "choice": choice}}
    if tools is not None:
        said["tools"] = tools
    if choices is not None:
        said["choices"] = choices
    return said


@pytest.fixture
def chat(record):
    """A tool call, its answer, a side call, and a second continuation of the first."""
    session = record(harness="codex")
    first = session.call(
        [1],
        [5],
        conversation=state([{"role": "system", "content": "be"}, user("q")], tools=TOOLS),
        message=calling("look"),
    )
    session.call(
        [9], [8], kind=CallKind.SIDE, conversation=state([user("title?")]), message=assistant("T")
    )
    session.call(
        [1, 5, 2],
        [6],
        parent=first,
        conversation=state([result("look")], base=first),
        message=assistant("42"),
    )
    session.call(
        [1, 5, 3],
        [7],
        parent=first,
        conversation=state([result("look"), user("sure?")], base=first),
        message=assistant("yes"),
    )
    return session


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_the_conversation_up_to_a_reply_that_none_continues(reader, chat, tmp_path):
    report = export_chat(reader, tmp_path / "chat.jsonl")
    first, second = lines(tmp_path / "chat.jsonl")
    opening = [{"role": "system", "content": "be"}, user("q")]
    assert first == {
        "messages": [*opening, shown("look"), result("look"), assistant("42")],
        "tools": TOOLS,
    }
    assert second["messages"] == [
        *opening,
        shown("look") | {"weight": 0},
        result("look"),
        user("sure?"),
        assistant("yes"),
    ]
    assert (report.sessions, report.rows) == (1, 2)
    assert (report.tokens, report.untrained, report.left_out) == (3, {"kind_side": 1}, {})


def test_what_the_harness_wrote_as_the_assistant_is_not_learned(reader, record, tmp_path):
    record().call(
        [1],
        [5],
        conversation=state([user("q"), assistant("shot"), user("r")]),
        message=assistant("a"),
    )
    export_chat(reader, tmp_path / "chat.jsonl")
    (line,) = lines(tmp_path / "chat.jsonl")
    assert [message.get("weight", 1) for message in line["messages"]] == [1, 0, 1, 1]


def test_a_break_starts_from_its_own_messages_and_not_from_its_parents(reader, record, tmp_path):
    session = record()
    first = session.call([1], [5], conversation=state([user("a")]), message=assistant("b"))
    session.call(
        [2], [6], parent=first, conversation=state([user("summary")]), message=assistant("c")
    )
    export_chat(reader, tmp_path / "chat.jsonl")
    found = [[m["content"] for m in line["messages"]] for line in lines(tmp_path / "chat.jsonl")]
    assert found == [["a", "b"], ["summary", "c"]]


def test_a_continued_second_choice_is_followed(reader, record, tmp_path):
    session = record()
    first = session.call(
        [1],
        [5],
        [6],
        conversation=state([user("q")], choices=[assistant("two")]),
        message=assistant("one"),
    )
    session.call(
        [1, 6, 7],
        [8],
        parent=first,
        conversation=state([user("more")], base=first, choice=1),
        message=assistant("end"),
    )
    export_chat(reader, tmp_path / "chat.jsonl")
    found = [[m["content"] for m in line["messages"]] for line in lines(tmp_path / "chat.jsonl")]
    assert found == [["q", "one"], ["q", "two", "more", "end"]]


def test_calls_that_ended_badly_or_were_not_understood_are_counted(reader, record, tmp_path):
    session = record()
    session.call([1], [5], status=CallStatus.PARTIAL, usage={}, conversation=state([user("a")]))
    session.call([1], [5], message={})
    session.call([1], [5, 6], conversation={})
    report = export_chat(reader, tmp_path / "chat.jsonl")
    assert report.rows == 0
    assert report.untrained == {"partial": 1, "conversation_incomplete": 3}
    assert report.left_out == {"conversation_incomplete": 2}


def test_the_chat_file_is_read_by_datasets(reader, chat, tmp_path):
    export_chat(reader, tmp_path / "chat.jsonl")
    loaded = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "chat.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert loaded[0]["messages"][-1]["content"] == "42"


@pytest.fixture
def rewarded(record, writer):
    writer.add_sync(
        TaskRecord("t0", "shop", "train", {}, 1.0), TaskRecord("t1", "shop", "eval", {}, 1.0)
    )
    made = []
    for number in range(4):
        harness = "pi" if number > 2 else "codex"
        task = {"task_suite": "shop", "task_split": "eval" if number % 2 else "train"}
        session = record(**task, task_id=f"t{number % 2}", group_id="g", harness=harness)
        first = session.call([1, 2], [5, 6], conversation=state([user("q")]))
        session.call([1, 2, 5, 6, number], [8], parent=first, conversation=state([], base=first))
        if number < 3:
            writer.add_sync(Reward(session.id, "reward", number / 10, 1.0))
            writer.add_sync(Reward(session.id, "reward", number / 10 + 0.05, 2.0))
            writer.add_sync(Reward(session.id, "speed", 9.0, 2.0, call_id=first))
        made.append(session)
    return made


@pytest.mark.parametrize(
    ("selection", "numbers"),
    [
        (Selection(), [0, 1, 2, 3]),
        (Selection(min_reward=0.1), [1, 2]),
        (Selection(max_reward=0.2), [0, 1]),
        (Selection(harness="pi"), [3]),
        (Selection(split="eval"), [1, 3]),
        (Selection(reward="speed", min_reward=0.0), []),
        (Selection(rules=SampleRules(kinds=frozenset())), []),
    ],
)
def test_exports_take_what_is_selected(reader, rewarded, tmp_path, selection, numbers):
    wanted = [rewarded[number].id for number in numbers]
    export_parquet(reader, tmp_path / "x.parquet", selection)
    assert [sample.session_id for sample in read_samples(tmp_path / "x.parquet")] == wanted
    assert export_chat(reader, tmp_path / "x.jsonl", selection).rows == len(wanted)


def test_what_a_bound_leaves_out_is_counted(reader, rewarded, tmp_path):
    report = export_parquet(reader, tmp_path / "x.parquet", Selection(min_reward=0.1))
    assert report.left_out == {"session_reward_out_of_bounds": 1, "session_without_reward": 1}
    assert (report.sessions, report.rows, report.tokens) == (2, 2, 6)


def test_samples_come_back_from_parquet_bit_for_bit(reader, agent, tmp_path):
    export_parquet(reader, tmp_path / "x.parquet")
    expected = build(LoadedSession.load(reader, agent.id), SampleRules()).samples
    found = list(read_samples(tmp_path / "x.parquet"))
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        for name in ("token_ids", "mask", "logprobs", "versions", "calls"):
            one, other = getattr(left, name), getattr(right, name)
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
        for name in ("session_id", "leaf_call_id", "kind", "role", "roles", "call_ids", "weight"):
            assert getattr(left, name) == getattr(right, name)


def test_a_sample_keeps_which_policy_each_of_its_calls_asked(reader, record, tmp_path):
    session = record()
    first = session.call([1], [50])
    session.call([1, 50, 2], [51], parent=first, policy="planner")
    export_parquet(reader, tmp_path / "x.parquet")
    (sample,) = read_samples(tmp_path / "x.parquet")
    assert sample.policies == ("policy", "planner")


def test_the_parquet_file_is_read_by_datasets(reader, rewarded, tmp_path):
    path = tmp_path / "x.parquet"
    export_parquet(reader, path)
    loaded = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    samples = list(read_samples(path))
    assert loaded.column_names[-2:] == ["reward.reward", "reward.speed"]
    for row, sample in zip(loaded, samples, strict=True):
        assert row["token_ids"] == sample.token_ids.tolist()
        assert row["mask"] == sample.mask.tolist()
        assert np.float32(row["logprobs"]).tobytes() == sample.logprobs.tobytes()
    assert loaded["reward.reward"][:] == [0.05, 0.15000000000000002, 0.25, None]
    assert loaded["reward.speed"][:] == [None] * 4
