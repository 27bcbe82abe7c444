"""Each format is what its own readers take: checked by its schema and its library."""

import csv
import json
from typing import Any, Literal

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from bridle.reconstruct.exports.formats import EXPORTS, export, format_of
from bridle.reconstruct.exports.message_csv import inert, recorded
from bridle.reconstruct.exports.selection import Selection
from bridle.reconstruct.samples.rules import SampleRules
from bridle.store.records import CallKind
from bridle.store.reward import Reward

JSON_LINES = [
    name
    for name in EXPORTS.names()
    if format_of(name).suffix == ".jsonl" and not name.startswith(("preference", "replay"))
]
"""The formats of single sessions that are trained on; preferences compare those of a group."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "look up",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
        },
    }
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


# Agent Data Protocol 1.5.0, as far as a text-only trajectory with tools goes.


class ApiAction(Strict):
    class_: Literal["api_action"]
    function: str
    kwargs: dict[str, Any]
    description: str | None = None
    reasoning_content: str | None = None
    reward: float | None = None
    tool_call_id: str | None = None


class MessageAction(Strict):
    class_: Literal["message_action"]
    content: str
    description: str | None = None
    reasoning_content: str | None = None
    reward: float | None = None


class TextObservation(Strict):
    class_: Literal["text_observation"]
    content: str
    source: Literal["user", "agent", "environment"]
    name: str | None = None
    tool_call_id: str | None = None
    reward: float | None = None


class AdpTrajectory(Strict):
    schema_version: Literal["1.5.0"]
    id: str
    content: list[ApiAction | MessageAction | TextObservation]
    details: dict[str, Any]

    def model_post_init(self, _: Any) -> None:
        actions = {c.tool_call_id for c in self.content if isinstance(c, ApiAction)} - {None}
        results = [c.tool_call_id for c in self.content if isinstance(c, TextObservation)]
        assert actions == set(results) - {None}
        for action, after in zip(self.content, self.content[1:], strict=False):
            if isinstance(action, ApiAction) and isinstance(after, TextObservation):
                assert action.tool_call_id is not None


# ATIF 1.7.


class AtifToolCall(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class AtifResult(Strict):
    source_call_id: str | None = None
    content: str | None = None


class AtifObservation(Strict):
    results: list[AtifResult]


class AtifMetrics(Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class AtifStep(Strict):
    step_id: int
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    message: str
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None

    def model_post_init(self, _: Any) -> None:
        if self.source != "agent":
            assert (self.model_name, self.tool_calls, self.metrics) == (None, None, None)
        known = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation else ():
            assert result.source_call_id in known


class AtifAgent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class AtifFinal(Strict):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_steps: int | None = None


class AtifTrajectory(Strict):
    schema_version: Literal["ATIF-v1.7"]
    session_id: str
    trajectory_id: str
    agent: AtifAgent
    steps: list[AtifStep]
    final_metrics: AtifFinal
    extra: dict[str, Any]

    def model_post_init(self, _: Any) -> None:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))


def user(text):
    return {"role": "user", "content": text}


def calling(*ids, content=None, arguments='{"at": 1}'):
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": name, "type": "function", "function": function} for name in ids]
    return {"role": "assistant", "content": content, "reasoning": "hm", "tool_calls": calls}


def result(name, content="42"):
    return {"role": "tool", "tool_call_id": name, "content": content}


def tail(*messages, base=None, tools=None):
    said = {"tail": list(messages), "lineage": {"base": base, "choice": 0}}
    return said | ({} if tools is None else {"tools": tools})


def said(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def talk(record):
    """``talk(prefix)``: two tool calls at once, an answer, another try at it, a side call."""

    def start(prefix="a", **fields):
        session = record(**{"harness": "codex", **fields})
        system = {"role": "system", "content": "be"}
        first = session.call(
            [1, 2],
            [5, 6, 7],
            conversation=tail(system, user("q"), tools=TOOLS),
            message=calling(f"{prefix}1", f"{prefix}2", content="wait"),
        )
        answered = (result(f"{prefix}1"), result(f"{prefix}2", "43"))
        second = session.call(
            [1, 2, 5, 6, 7, 3],
            [8, 9],
            parent=first,
            conversation=tail(*answered, base=first),
            message=said("85"),
        )
        third = session.call(
            [1, 2, 5, 6, 7, 4],
            [10],
            parent=first,
            conversation=tail(*answered, user("sure?"), base=first),
            message=said("yes"),
        )
        session.call([9], [11], kind=CallKind.SIDE, conversation=tail(user("t")), message=said("T"))
        session.call_ids = (first, second, third)
        return session

    return start


@pytest.fixture
def written(reader, tmp_path):
    """``written(format, **selection)``: the lines of an export, and its report."""

    def write(form, **selection):
        path = tmp_path / f"{form}.jsonl"
        report = export(reader, path, form, Selection(**selection))
        return [json.loads(line) for line in path.read_text().splitlines()], report

    return write


def load(path, tmp_path):
    return datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )


@pytest.mark.parametrize("form", JSON_LINES)
def test_datasets_reads_every_conversational_format_back_as_written(talk, written, tmp_path, form):
    talk("a")
    talk("b")
    lines, report = written(form)
    loaded = load(tmp_path / f"{form}.jsonl", tmp_path)
    assert len(loaded) == report.rows == len(lines) > 0
    assert set(loaded.column_names) == set().union(*lines)


def test_trl_conversational_holds_what_is_trained_throughout(talk, written):
    talk()
    lines, report = written("trl")
    (line,) = lines
    assert [message["role"] for message in line["messages"]] == [
        "system", "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert line["messages"][2]["tool_calls"][1]["function"]["arguments"] == {"at": 1}
    assert line["messages"][2]["reasoning_content"] == "hm"
    assert json.loads(line["tools"]) == TOOLS
    assert report.left_out["conversation_partly_trained"] == 1


def test_prompt_completion_has_a_row_for_each_trained_reply_and_no_reply_twice(talk, written):
    talk()
    lines, _ = written("trl-prompt-completion")
    assert [line["completion"][0]["content"] for line in lines] == ["wait", "85", "yes"]
    assert [len(line["prompt"]) for line in lines] == [2, 5, 6]


def test_sharegpt_has_a_weight_on_each_reply_and_tools_as_text(talk, written):
    talk()
    (first, second), _ = written("sharegpt")
    speakers = [turn["from"] for turn in first["conversations"]]
    assert speakers == ["system", "human", "gpt", "tool", "gpt"]
    assert first["conversations"][2]["value"] == (
        "<think>\nhm\n</think>\n\nwait\n"
        + "\n".join(['<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'] * 2)
    )
    assert first["conversations"][3]["value"].count("<tool_response>") == 2
    weights = [turn["weight"] for turn in second["conversations"] if turn["from"] == "gpt"]
    assert weights == [0, 1]
    assert json.loads(first["tools"]) == TOOLS


@pytest.mark.parametrize(
    ("sampled", "reply"),
    [
        ("<think>\nhm\n</think>\n\n42", said("\n\n42") | {"reasoning": "\nhm\n"}),
        ("<think>\n\n hm\n\n</think>\n\n\n42", said("\n\n\n42") | {"reasoning": "\n\n hm\n\n"}),
        ("<think>\n\n</think>\n\n42", said("\n\n42") | {"reasoning": "\n\n"}),
        ("\n42\n", said("\n42\n")),
        (
            '<think>\nhm\n</think>\n\nwait\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n'
            "</tool_call>",
            calling("z", content="\n\nwait\n") | {"reasoning": "\nhm\n"},
        ),
        (
            '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n'
            "</tool_call>",
            calling("z", content="\n\n") | {"reasoning": "\nhm\n"},
        ),
    ],
)
def test_sharegpt_says_a_reply_as_it_was_sampled(record, written, sampled, reply):
    record().call([1], [5], conversation=tail(user("q")), message=reply)
    (line,), _ = written("sharegpt")
    assert line["conversations"][-1]["value"] == sampled
    assert "tools" not in line


def test_agent_data_protocol_lines_meet_its_schema(talk, written, writer):
    session = talk()
    writer.add_sync(Reward(session.id, "score", 0.1 + 0.2, 1.0))
    lines, _ = written("adp")
    first, second = (AdpTrajectory.model_validate(line) for line in lines)
    kinds = [item.class_ for item in first.content]
    assert kinds == ["text_observation"] * 2 + ["api_action"] * 2 + ["text_observation"] * 2 + [
        "message_action"
    ]
    assert first.details["rewards"] == {"score": 0.1 + 0.2}
    assert first.details["trained_actions"] == [2, 3, 6]
    assert second.details["trained_actions"] == [7]


def test_calls_that_nothing_answers_yet_go_without_an_id(record, written):
    record().call([1], [5], conversation=tail(user("q")), message=calling("z"))
    (line,), _ = written("adp")
    assert "tool_call_id" not in AdpTrajectory.model_validate(line).content[-1].model_fields_set


def test_atif_lines_meet_its_schema_and_carry_the_tokens_exactly(talk, written, reader):
    session = talk()
    lines, _ = written("atif")
    first, second = (AtifTrajectory.model_validate(line) for line in lines)
    for trajectory in (first, second):
        for step in trajectory.steps:
            if step.metrics is None:
                continue
            (choice,) = reader.sampled(step.extra["call_id"])
            ids = np.array(step.metrics.completion_token_ids, dtype=np.uint32)
            logprobs = np.array(step.metrics.logprobs, dtype=np.float32)
            assert ids.tobytes() == choice.token_ids.tobytes()
            assert logprobs.tobytes() == choice.logprobs.tobytes()
    assert [step.is_copied_context for step in second.steps if step.source == "agent"] == [
        True,
        None,
    ]
    assert first.steps[2].observation.results[1].content == "43"
    assert first.trajectory_id == session.call_ids[1]


def test_a_trace_has_every_call_as_a_timed_request(talk, record, written, writer):
    """A call that was answered from the record reached no engine, so the trace leaves it out."""
    session = talk()
    record().call(
        [9], [11], conversation=tail(user("later")), message=said("L"), replayed_call_id="call_x"
    )
    record().call([9], [11], message=said("no conversation was recorded"))
    lines, report = written("replay")
    assert [line["output_length"] for line in lines] == [3, 2, 1, 1]
    assert {line["session_id"] for line in lines} == {session.id}
    at = [line["timestamp"] for line in lines]
    assert at == sorted(at)
    assert at[0] >= 0
    first, second, _third, side = lines
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["tools"] == TOOLS
    assert [message["role"] for message in second["messages"]][2:] == ["assistant", "tool", "tool"]
    assert side["messages"] == [user("t")]
    assert "tools" not in side
    assert (report.rows, report.tokens) == (4, 0)
    assert report.left_out == {"answered_from_the_record": 1, "call_without_reply": 1}


@pytest.mark.parametrize(
    ("messages", "reply", "forms", "reason"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            said("a"),
            ("trl", "sharegpt", "adp", "atif"),
            "content_not_text",
        ),
        (
            [user("q")],
            calling("z", arguments='{"at"'),
            ("trl", "sharegpt", "adp", "atif"),
            "tool_arguments_not_json",
        ),
        (
            [user("q")],
            calling("z", arguments='{"account": 123456789012345678901}'),
            ("trl", "sharegpt", "adp", "atif"),
            "tool_arguments_not_exact",
        ),
        (
            [user("q"), calling("y"), user("no")],
            said("a"),
            ("adp",),
            "tool_call_without_result",
        ),
        (
            [user("q"), result("y")],
            said("a"),
            ("adp", "atif"),
            "tool_result_without_call",
        ),
        (
            [user("q"), calling("y"), result("y"), calling("y"), result("y")],
            said("a"),
            ("adp",),
            "tool_call_id_twice",
        ),
        ([{"role": "critic", "content": "x"}], said("a"), ("sharegpt",), "role_unknown"),
    ],
)
def test_what_a_format_cannot_say_is_left_out_and_counted(
    record, written, messages, reply, forms, reason
):
    record().call([1], [5], conversation=tail(*messages), message=reply)
    for form in forms:
        if form == "trl" and any(m["role"] == "assistant" for m in messages):
            continue
        lines, report = written(form, rules=SampleRules(media=True))
        assert (lines, report.left_out) == ([], {reason: 1})
    assert len(written("chat", rules=SampleRules(media=True))[0]) == 1


@pytest.mark.parametrize("form", JSON_LINES)
def test_a_reply_whose_first_line_cannot_be_written_is_trained_in_the_next(record, written, form):
    session = record()
    first = session.call([1], [5, 6], conversation=tail(user("q")), message=said("well"))
    for token, reply in ((2, calling("a", arguments="{")), (3, said("yes"))):
        later = tail(user(f"then {token}"), base=first)
        session.call([1, 5, 6, token], [7], parent=first, conversation=later, message=reply)
    _, report = written(form)
    if form == "chat":
        assert (report.rows, report.tokens, report.left_out) == (2, 4, {})
    else:
        assert (report.tokens, report.left_out) == (3, {"tool_arguments_not_json": 1})


@pytest.mark.parametrize(
    "text",
    ["=HYPERLINK(1)", "+1", "-3 °C", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "'=1", "''-"],
)
def test_no_cell_of_a_table_begins_like_a_formula(record, tmp_path, reader, text):
    session = record()
    session.call([1], [5], conversation=tail(user(text)), message=said(text))
    path = tmp_path / "table.csv"
    export(reader, path, "csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["content"] for row in rows] == [f"'{text}"] * 2
    assert [recorded(row["content"]) for row in rows] == [text] * 2


@given(st.text(alphabet=st.sampled_from("'=+-@\t\r\n a1")) | st.text())
def test_a_cell_gives_its_text_back(text):
    assert recorded(inert(text)) == text
    assert inert(text)[:1] not in set("=+-@\t\r\n")
