"""One function decides what is trained: everyone who trains or counts tokens agrees."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from bridle.diagnosis.ablation import ablate
from bridle.reconstruct.audit import audit
from bridle.reconstruct.conditions import Condition
from bridle.reconstruct.episodes import episodes
from bridle.reconstruct.exports.formats import EXPORTS, export, format_of
from bridle.reconstruct.exports.selection import Selection
from bridle.reconstruct.samples.builders import BUILDERS, build
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.session import LoadedSession
from bridle.store.records import FROZEN, CallKind, CallStatus, Choice, Note, Sampler, VersionRun
from bridle.store.reward import Reward
from bridle.trainer.sft.data import examples_from_store
from support.parquet import read_samples

JSON_LINES = [
    name
    for name in EXPORTS.names()
    if format_of(name).suffix == ".jsonl" and not name.startswith(("preference", "replay"))
]
"""The formats of single sessions that are trained on; preferences compare those of a group."""

MAIN = frozenset({CallKind.MAIN})

GRID = {
    "default": SampleRules(),
    "main": SampleRules(kinds=MAIN),
    "no kind": SampleRules(kinds=frozenset()),
    "partial": SampleRules(partial=True),
    "not cut": SampleRules(finish_length=False),
    "parsed": SampleRules(parse_failed=False),
    "any sampler": SampleRules(samplers="any"),
    "one model": SampleRules(models=frozenset({"small"})),
    "fresh": SampleRules(oldest_version=2),
    "future": SampleRules(oldest_version=5),
    "trusted": SampleRules(untrusted_versions=frozenset({1, 3})),
    "condition": SampleRules(where=(Condition.parse("call.finish_reason=length"),)),
    "good turns": SampleRules(turn_reward="step", min_turn_reward=0.5),
    "strict": SampleRules(kinds=MAIN, oldest_version=2, parse_failed=False, finish_length=False),
}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
MEDIA = {
    "image": IMAGE,
    "sound": {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    "file": {"type": "file", "file": {"file_id": "f"}},
    "what is not known": {"type": "hologram"},
}


class Replies:
    """Records calls whose replies have token ids and a text of their own."""

    def __init__(self, recording) -> None:
        self.recording = recording
        self.tokens: dict[str, list[int]] = {}
        """The token ids, by the text of each reply."""
        self._path: dict[str | None, list[int]] = {None: []}

    def call(
        self, length, parent=None, choices=1, versions=None, mark="", content=None, **fields
    ) -> str:
        prompt = [*self._path[parent], 1000 + len(self.tokens)]
        replies = []
        for _ in range(choices):
            text = f"reply {len(self.tokens)}{mark}"
            first = 100 + 10 * len(self.tokens)
            self.tokens[text] = list(range(first, first + length))
            replies.append(text)
        messages = [{"role": "assistant", "content": text} for text in replies]
        conversation = {
            "tail": [{"role": "user", "content": content or f"question {len(self.tokens)}"}],
            "lineage": {"base": parent, "choice": 0},
            "choices": messages[1:],
        }
        if versions is not None:
            ids = np.array(self.tokens[replies[0]], dtype=np.uint32)
            logprobs = np.full(length, -0.5, dtype=np.float32)
            fields["choices"] = (Choice(ids, logprobs, versions, "stop"),)
        call_id = self.recording.call(
            prompt,
            *(self.tokens[text] for text in replies),
            parent=parent,
            conversation=conversation,
            message=messages[0],
            **fields,
        )
        self._path[call_id] = [*prompt, *self.tokens[replies[0]]]
        return call_id

    def count(self, texts) -> int:
        return sum(len(self.tokens[text]) for text in texts)

    def whole(self, trained: set[int]) -> set[str]:
        """The replies of which every token is trained."""
        return {text for text, ids in self.tokens.items() if trained.issuperset(ids)}


@pytest.fixture
def replies(record, writer):
    """A session in which every rule finds replies to train and replies to leave out."""
    session = record(harness="codex")
    found = Replies(session)
    first = found.call(3)
    mixed = found.call(4, parent=first, versions=(VersionRun(0, 1), VersionRun(1, 2)))
    second = found.call(2, parent=mixed, version=2, finish="length")
    found.call(2, parent=second, version=3, model_served="small")
    found.call(1, parent=first, version=2, mark=" <tool_call>")
    found.call(2, parent=second, choices=3, version=2, sampler=Sampler(grammar="tool"))
    cut = found.call(3, version=2, status=CallStatus.PARTIAL, usage={})
    found.call(2, parent=cut, version=2)
    found.call(2, kind=CallKind.SUBAGENT, version=3)
    found.call(3, kind=CallKind.SIDE, version=3)
    found.call(2, notes=(Note(FROZEN, "other"),))
    seen = found.call(2, content=[{"type": "text", "text": "see"}, IMAGE])
    found.call(2, parent=seen)
    found.call(2, prompt_token_ids=None)
    found.call(2, usage={"prompt_tokens": 1, "completion_tokens": 7})
    for call_id, value in ((first, 1.0), (second, 0.2), (mixed, 0.5)):
        writer.add_sync(Reward(session.id, "step", value, 1.0, call_id=call_id))
    return found


def trained_ids(samples) -> list[int]:
    return [token for s in samples for token in s.token_ids[s.mask].tolist()]


def trained_texts(form: str, line) -> list[str]:
    """The replies that a line trains, each in its format's own way."""
    match form:
        case "chat" | "trl":
            said = [m for m in line["messages"] if m["role"] == "assistant"]
            return [message["content"] for message in said if message.get("weight") != 0]
        case "trl-prompt-completion":
            return [message["content"] for message in line["completion"]]
        case "sharegpt":
            said = [turn for turn in line["conversations"] if turn["from"] == "gpt"]
            return [turn["value"] for turn in said if turn["weight"]]
        case "adp":
            actions = line["details"]["trained_actions"]
            return [line["content"][index]["content"] for index in actions]
    said = [step for step in line["steps"] if step["source"] == "agent"]
    return [step["message"] for step in said if not step.get("is_copied_context")]


@pytest.mark.parametrize("rules", GRID.values(), ids=GRID)
def test_samples_sft_ablation_and_audit_train_the_same_tokens(reader, replies, tmp_path, rules):
    (audited,) = audit(reader, rules)
    assert audited.clean
    (episode,) = episodes(reader, rules)
    wanted = sorted(trained_ids(episode.samples))
    assert len(wanted) == audited.conservation.trained
    left_out: Counter[str] = Counter()
    assert sorted(trained_ids(examples_from_store(reader, Selection(rules=rules), left_out))) == (
        wanted
    )
    rows = ablate(reader, rules).as_data()["builders"]
    assert {name: row["tokens_trained"] for name, row in rows.items()} == dict.fromkeys(
        BUILDERS, len(wanted)
    )
    report = export(reader, tmp_path / "x", "tokens", Selection(rules=rules))
    assert sorted(trained_ids(read_samples(tmp_path / "x"))) == wanted
    assert report.tokens == len(wanted)
    table = audited.conservation
    assert report.untrained == Counter(table.masked) + Counter(table.dropped)


@pytest.mark.parametrize("rules", GRID.values(), ids=GRID)
def test_every_format_of_messages_trains_the_replies_that_samples_train_whole(
    reader, replies, tmp_path, rules
):
    (audited,) = audit(reader, rules)
    (episode,) = episodes(reader, rules)
    trained = set(trained_ids(episode.samples))
    whole = replies.whole(trained)
    partly = len(trained) - replies.count(whole)
    for form in JSON_LINES:
        report = export(reader, tmp_path / "x", form, Selection(rules=rules))
        lines = [json.loads(line) for line in (tmp_path / "x").read_text().splitlines()]
        found = [text for line in lines for text in trained_texts(form, line)]
        assert len(found) == len(set(found)), "no reply is trained twice"
        assert report.tokens == replies.count(found)
        assert report.tokens + report.untrained.total() == audited.conservation.captured
        assert report.untrained["reply_partly_trained"] == partly
        # TRL's conversational format has no context: it leaves such conversations out.
        missing = report.untrained["conversation_partly_trained"]
        assert set(found) <= whole
        assert replies.count(whole - set(found)) == missing
        assert form == "trl" or not missing


def test_a_rule_on_sessions_is_refused():
    with pytest.raises(ValueError, match="harness=pi"):
        SampleRules(where=(Condition.parse("harness=pi"),))
    with pytest.raises(ValueError, match="one of the rules"):
        Selection(where=(Condition.parse("call.dialect=chat"),))


@pytest.mark.parametrize("part", MEDIA.values(), ids=MEDIA)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_call_that_was_shown_more_than_text_is_masked_with_a_reason_and_so_is_what_follows(
    record, reader, part, role
):
    session = record(harness="codex")
    prompts = [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    shown = ["a question", [{"type": "text", "text": "look"}, part], "and now?"]
    parent = None
    for number, (prompt, content) in enumerate(zip(prompts, shown, strict=True)):
        message = {"role": role if number == 1 else "user", "content": content}
        parent = session.call(
            prompt,
            [prompt[-1] + 1],
            parent=parent,
            conversation={"tail": [message], "lineage": {"base": parent, "choice": 0}},
        )
    loaded = LoadedSession.load(reader, session.id)
    built = build(loaded, SampleRules())
    assert built.conservation.trained == 1
    assert built.conservation.untrained == {"prompt_media": 2}
    assert built.conservation.balanced
    assert build(loaded, SampleRules(media=True)).conservation.trained == 3
    kept = loaded.calls[1].conversation.tail[0].content
    assert kept[1] == part, "the record keeps it"
