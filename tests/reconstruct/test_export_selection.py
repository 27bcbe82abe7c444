"""Filters, turn masks, de-duplication, the split and the card."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from bridle.reconstruct.conditions import BadCondition, Condition
from bridle.reconstruct.exports.card import write_card
from bridle.reconstruct.exports.formats import EXPORTS, export
from bridle.reconstruct.exports.parquet import export_parquet
from bridle.reconstruct.exports.selection import Selection, part_of
from bridle.reconstruct.samples.rules import SampleRules
from bridle.store.records import CallKind, CallStatus, TaskRecord
from bridle.store.reward import Reward
from support.parquet import read_samples


def state(text, base=None):
    tail = [{"role": "user", "content": text}]
    return {"tail": tail, "lineage": {"base": base, "choice": 0}}


def of(task):
    return {"task_suite": "shop", "task_split": "train", "task_id": task}


@pytest.fixture
def sessions(record, writer):
    """Four sessions of two turns; the tasks, labels and rewards differ."""
    writer.add_sync(*(TaskRecord(f"t{n}", "shop", "train", {"level": n}, 1.0) for n in range(4)))
    made = []
    for n in range(4):
        session = record(**of(f"t{n}"), harness=f"h{n % 2}", labels={"seed": n, "hard": n > 1})
        first = session.call([1, 2], [5, 6], conversation=state("q"), model_served=f"m{n % 2}")
        second = session.call(
            [1, 2, 5, 6, 7], [8], parent=first, conversation=state("r", first), model_served="m9"
        )
        writer.add_sync(Reward(session.id, "score", n / 4, 1.0))
        writer.add_sync(Reward(session.id, "step", 0.2, 1.0, call_id=first))
        writer.add_sync(Reward(session.id, "step", n / 4, 2.0, call_id=second))
        made.append(session)
    return made


def taken(reader, path, *texts, **fields):
    where = tuple(Condition.parse(text) for text in texts)
    export_parquet(reader, path, Selection(where=where, **fields))
    return list(read_samples(path))


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["harness=h1"], [1, 3]),
        (["harness!=h1"], [0, 2]),
        (["task.level>=2"], [2, 3]),
        (["task.suite=shop", "task.id!=t0"], [1, 2, 3]),
        (["label.seed<2"], [0, 1]),
        (["label.hard=true"], [2, 3]),
        (["label.none=null", "reward.score>0.3"], [2, 3]),
        (["reward.none>0"], []),
        (["outcome=null", "harness = h0"], [0, 2]),
        (["outcome=open", "harness = h0"], [0, 2]),
        (["outcome!=open"], []),
    ],
)
def test_any_column_filters_sessions(reader, sessions, tmp_path, texts, numbers):
    found = taken(reader, tmp_path / "x.parquet", *texts)
    assert [sample.session_id for sample in found] == [sessions[n].id for n in numbers]


def test_a_condition_on_calls_masks_the_others_and_keeps_them_as_context(
    reader, sessions, tmp_path
):
    rules = SampleRules(where=(Condition.parse("call.model_served=m1"),))
    found = taken(reader, tmp_path / "x.parquet", rules=rules)
    assert [sample.session_id for sample in found] == [sessions[1].id, sessions[3].id]
    for sample in found:
        assert sample.token_ids.tolist() == [1, 2, 5, 6, 7, 8]
        assert sample.mask.tolist() == [False, False, True, True, False, False]
        assert sample.weight == 1.0


@pytest.mark.parametrize(
    "text", ["harness", "nonesuch=1", "call.nonesuch=1", "a.b=1", "label.x>many", "key_hash=1", ""]
)
def test_a_condition_that_means_nothing_is_refused(text):
    with pytest.raises(BadCondition):
        Condition.parse(text)


def test_only_good_turns_are_trained_in_tokens_and_in_messages(reader, sessions, tmp_path):
    selection = Selection(rules=SampleRules(turn_reward="step", min_turn_reward=0.5))
    report = export_parquet(reader, tmp_path / "x.parquet", selection)
    found = list(read_samples(tmp_path / "x.parquet"))
    assert [sample.session_id for sample in found] == [sessions[2].id, sessions[3].id]
    assert all(sample.token_ids[sample.mask].tolist() == [8] for sample in found)
    assert report.untrained == {"turn_reward_too_low": 10}
    assert report.left_out == {"session_without_trained_tokens": 2}
    export(reader, tmp_path / "x.jsonl", "chat", selection)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    weights = [[m.get("weight", 1) for m in line["messages"]] for line in lines]
    assert weights == [[1, 0, 1, 1]] * 2


def test_a_turn_without_the_reward_is_not_a_good_turn(reader, sessions, tmp_path):
    selection = Selection(rules=SampleRules(turn_reward="nonesuch"))
    report = export_parquet(reader, tmp_path / "x.parquet", selection)
    assert (report.rows, report.untrained) == (0, {"turn_without_reward": 12})


@pytest.mark.parametrize("form", ["tokens", "chat", "atif"])
def test_repeated_rows_are_left_out_when_asked(reader, sessions, tmp_path, form):
    path = tmp_path / "x"
    assert export(reader, path, form).rows == 4
    report = export(reader, path, form, Selection(deduplicate=True))
    assert (report.rows, report.left_out) == (1, {"duplicate": 3})


def test_conversations_that_differ_only_in_minted_ids_are_the_same(reader, record, tmp_path):
    for name in ("x", "y", "z"):
        function = {"name": "look", "arguments": "{}" if name != "z" else '{"a": 1}'}
        message = {"role": "assistant", "content": None}
        message["tool_calls"] = [{"id": f"call_{name}", "type": "function", "function": function}]
        session = record()
        first = session.call([1], [5], conversation=state("q"), message=message)
        answer = {"role": "tool", "tool_call_id": f"call_{name}", "content": "1"}
        lineage = {"base": first, "choice": 0}
        session.call(
            [1, 5, 2], [6], parent=first, conversation={"tail": [answer], "lineage": lineage}
        )
    report = export(reader, tmp_path / "x", "chat", Selection(deduplicate=True))
    assert (report.rows, report.left_out) == (2, {"duplicate": 1})


@pytest.mark.parametrize("form", [form for form in EXPORTS.names() if form != "replay"])
def test_a_repeated_session_is_left_out_whole_with_its_branches(reader, record, tmp_path, form):
    reports = []
    for _ in range(2):
        session = record()
        first = session.call([1], [5], conversation=state("q"))
        for token in (2, 3):
            later = state(f"then {token}", first)
            session.call([1, 5, token], [6], parent=first, conversation=later)
        reports.append(export(reader, tmp_path / "x", form, Selection(deduplicate=True)))
    once, twice = reports
    assert (twice.sessions, twice.rows, twice.tokens) == (2, once.rows, once.tokens)


def test_the_split_by_task_is_a_partition_that_stays(reader, sessions, record, tmp_path):
    again = [record(**of(f"t{n}")) for n in range(4)]
    for session in again:
        session.call([1], [5], conversation=state("q"))
    parts = {}
    for part in ("train", "eval"):
        selection = Selection(part=part, eval_share=0.5)
        parts[part] = {s.session_id for s in _samples(reader, tmp_path / part, selection)}
    everything = {session.id for session in [*sessions, *again]}
    assert parts["train"] | parts["eval"] == everything
    assert not parts["train"] & parts["eval"]
    for one, other in zip(sessions, again, strict=True):
        assert (one.id in parts["eval"]) == (other.id in parts["eval"]), "a task is in one part"


def test_the_share_of_tasks_held_out_is_the_share_asked_for(record):
    session = record().session
    held = [part_of(_of_task(session, f"task-{n}"), 0.2) for n in range(2000)].count("eval")
    assert 340 <= held <= 460


def test_the_card_tells_the_counts_the_sources_and_the_hash(reader, sessions, tmp_path):
    path = tmp_path / "x.parquet"
    selection = Selection(where=(Condition.parse("harness=h1"),))
    report = export_parquet(reader, path, selection)
    card = json.loads(write_card(report, "tokens", selection, 5.0).read_text())
    assert card["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert card["bytes"] == path.stat().st_size
    assert card["counts"] == {"rows": 2, "sessions": 2, "trainable_tokens": 6, "left_out": {
        "session_condition": 2}}  # fmt: skip
    source = card["provenance"]
    assert source["selection"]["where"] == ["harness=h1"]
    assert source["harness"] == {"h1": 2}
    assert source["task_id"] == {"t1": 1, "t3": 1}
    assert source["model"] == {"m1": 2, "m9": 2}
    assert source["policy_version"] == {"1": 4}
    assert card["rewards"]["score"] == {"count": 2, "mean": 0.5, "min": 0.25, "max": 0.75}
    ids = "\n".join(sorted([sessions[1].id, sessions[3].id]))
    assert source["sessions_sha256"] == hashlib.sha256(ids.encode()).hexdigest()


@pytest.mark.parametrize("form", ["tokens", "chat"])
def test_the_card_names_no_model_of_which_nothing_is_trained(reader, record, tmp_path, form):
    session = record()
    session.call([1], [5], conversation=state("q"), model_served="m1")
    session.call([2], [6], conversation=state("t"), model_served="small", kind=CallKind.SIDE)
    session.call([3], conversation=state("u"), model_served="away", status=CallStatus.FAILED)
    report = export(reader, tmp_path / "x", form)
    assert report.taken["model"] == {"m1": 1}
    assert report.taken["policy_version"] == {"1": 1}


def test_every_format_counts_the_tokens_that_it_trains(reader, sessions, record, tmp_path):
    choices = [{"role": "assistant", "content": text} for text in ("b", "c")]
    record().call([1], [5], [6, 7], [8, 9, 10], conversation=state("q") | {"choices": choices})
    for form in ("tokens", "chat", "trl-prompt-completion"):
        assert export(reader, tmp_path / "x", form).tokens == 4 * 3 + 6


@pytest.mark.parametrize("form", ["tokens", "chat"])
def test_a_session_without_a_call_is_counted(reader, sessions, record, tmp_path, form):
    record()
    report = export(reader, tmp_path / "x", form)
    assert (report.sessions, report.rows) == (5, 4)
    assert report.left_out == {"session_without_calls": 1}


@pytest.mark.parametrize("form", ["tokens", "chat"])
def test_the_card_tells_of_rewards_and_replies_that_are_in_the_file(
    reader, record, writer, tmp_path, form
):
    """Not of a session that failed, of one without a call, or of a repeated one."""
    first, again, _empty, failed = made = [record() for _ in range(4)]
    for session, reward in zip(made, (1.0, 0.5, 0.0, 0.0), strict=True):
        writer.add_sync(Reward(session.id, "score", reward, 1.0))
    for session in (first, again):
        session.call([1], [5], conversation=state("q"))
    failed.call([2], conversation=state("q"), status=CallStatus.FAILED)
    report = export(reader, tmp_path / "x", form, Selection(deduplicate=True))
    assert report.rewards == {"score": [1.0]}
    assert report.taken["policy_version"] == {"1": 1}
    assert report.left_out == {
        "duplicate": 1,
        "session_without_calls": 1,
        "session_without_trained_tokens": 1,
    }


def _samples(reader, path, selection):
    export_parquet(reader, path, selection)
    return read_samples(path)


def _of_task(session, task):
    return replace(session, **of(task))


def test_masks_of_kept_calls_sum_to_a_weight_of_one(reader, agent, tmp_path):
    rules = SampleRules(where=(Condition.parse("call.kind=subagent"),))
    export_parquet(reader, tmp_path / "x.parquet", Selection(rules=rules))
    (sample,) = read_samples(tmp_path / "x.parquet")
    assert sample.weight == 1.0
    assert int(np.count_nonzero(sample.mask)) == 3
