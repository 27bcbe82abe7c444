"""Odd replies made up at random: each is read right, or it is an error with its reason.

A reply is made from what it means (thoughts, texts, tool calls), written in the habits of upstreams
(one index for all calls or none, late names, pieces that alternate, objects for arguments, …), and
may be spoiled so that it means nothing (a chunk of another reply, a call without a name, …).
"""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bridle.store.records import CallStatus

ODD = runpy.run_path(str(Path(__file__).with_name("odd_upstream.py")))
Sent, Theatre = ODD["Sent"], ODD["OddUpstreams"]
DIALECTS = ("chat", "responses", "messages", "google")
AT_ONCE = 10
CI, LONG = 500, 50_000

HABITS = (
    "same_index",
    "no_index",
    "no_ids",
    "ids_on_each_piece",
    "names_on_each_piece",
    "late_names",
    "alternating",
    "pieces",
    "objects",
    "flat_calls",
    "null_choices",
    "null_fields",
    "float_usage",
    "null_usage",
    "parts",
    "odd_finish",
    "split_pairs",
    "no_logprob",
    "other_form",
    "legacy_call",
    "spaces",
)
SPOILS = (
    "other_id",
    "other_prompt",
    "other_choice",
    "nameless",
    "merged",
    "unknown_finish",
    "no_finish",
    "error_event",
    "error_choice",
    "junk",
)
TEXTS = ("a", " word", "é", "🙂", "x🙂y", '"', "\\", "\n\n", "data: ")
NAMES = ("weather", "time", "get_weather")
ARGUMENTS = (
    {},
    {"city": "Oslo"},
    {"city": "Rome"},
    {"a": [1, {"b": "}{"}], "c": '"\\'},
    {"text": "🙂 {[", "n": None},
)
FINISHES = {
    False: ("stop", "eos_token", "eos", "STOP", "end_turn", "stop_sequence"),
    True: ("tool_calls", "stop", "tool_use", "function_call", "eos"),
}


@dataclass(eq=False)
class Reply:
    """A reply's meaning, and its spelling."""

    seed: int
    habits: frozenset[str]
    spoils: frozenset[str]
    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.stream = rng.random() < 0.75
        self.external = rng.random() < 0.4
        self.dialect = rng.choice(DIALECTS)
        if rng.random() < 0.5:
            self.thinking = "".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.6:
            self.text = "".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 4)))
        for _ in range(rng.choice((0, 1, 2, 2, 3))):
            self.calls.append((rng.choice(NAMES), rng.choice(ARGUMENTS)))
        if self.spoils & {"nameless", "merged"} and not self.calls:
            self.calls.append((rng.choice(NAMES), ARGUMENTS[1]))
        if "legacy_call" in self.habits and len(self.calls) > 1:
            self.calls = self.calls[:1]
        self._made_unambiguous()
        self.id, self.tokens = "x", 0
        self.done = True

    def _made_unambiguous(self) -> None:
        """Takes away habits that leave open which call a piece belongs to."""
        habits = set(self.habits)
        if not self.stream:
            habits -= {"alternating", "pieces", "split_pairs", "null_choices"}
        if habits & {"same_index", "no_index"}:
            if "ids_on_each_piece" not in habits or "no_ids" in habits:
                habits.discard("alternating")
            if "no_ids" in habits:
                habits.discard("late_names")
        if "no_ids" in habits:
            habits.discard("ids_on_each_piece")
        if "late_names" in habits:
            habits.discard("names_on_each_piece")
        if "objects" in habits:
            habits.discard("pieces")
        if "merged" in self.spoils:
            habits.discard("names_on_each_piece")  # the name would tell the two calls apart
        if "legacy_call" in habits:
            habits -= {"same_index", "alternating", "late_names", "flat_calls"}
        self.habits = frozenset(habits)

    # -- as chunks -------------------------------------------------------------------------------

    def sent(self) -> Any:
        streamed = self.stream is not ("other_form" in self.habits)
        headers = {"content-type": "text/event-stream" if streamed else "application/json"}
        if not streamed:
            return Sent([self._dumped(self._whole()).encode()], 200, headers)
        events = [f"data: {self._dumped(one)}\n\n" for one in self._chunks()]
        if "junk" in self.spoils:
            events.insert(self.rng.randint(1, len(events)), "data: {not json\n\n")
        if self.done:
            events.append("data: [DONE]\n\n")
        data = "".join(events).encode()
        cuts = sorted(self.rng.randrange(len(data) + 1) for _ in range(self.rng.choice((0, 4))))
        edges = zip([0, *cuts], [*cuts, len(data)], strict=True)
        return Sent([data[a:b] for a, b in edges if b > a], 200, headers)

    def _dumped(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=True)

    def _body(self, choices: Any, **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": "o", "created": 1, "model": "s", "choices": choices} | more

    def _choice(self, said: dict[str, Any], name: str = "delta", **more: Any) -> dict[str, Any]:
        """A choice with one sampled token."""
        self.tokens += 1
        score = self.rng.choice([None, -9999.0, float("-inf"), float("nan")])
        logprob = score if "no_logprob" in self.habits else -0.25
        choice: dict[str, Any] = {"index": 0, name: said, "finish_reason": None, **more}
        if not self.external:
            choice["token_ids"] = [self.tokens]
            choice["logprobs"] = {"content": [{"token": "x", "logprob": logprob, "bytes": None}]}
        if "null_fields" in self.habits:
            said.setdefault("content", None)
            said.setdefault("tool_calls", None)
            choice.setdefault("logprobs", None)
        return choice

    def _prompt(self) -> dict[str, Any]:
        return {} if self.external else {"prompt_token_ids": [11, 12, 13]}

    def _finish(self) -> str | None:
        if "unknown_finish" in self.spoils:
            return "gave up"
        if "no_finish" in self.spoils:
            return None
        if "odd_finish" in self.habits:
            return self.rng.choice(FINISHES[bool(self.calls)])
        return "tool_calls" if self.calls else "stop"

    def _usage(self) -> Any:
        if "null_usage" in self.habits and self.external:
            return None
        number = float if "float_usage" in self.habits else int
        counts = {"prompt_tokens": number(3), "completion_tokens": number(self.tokens)}
        return counts | {"prompt_tokens_details": None}

    def _said(self, text: str, thinking: str) -> dict[str, Any]:
        if "parts" in self.habits and (text or thinking):
            parts: list[Any] = []
            if thinking:
                inner = [{"type": "text", "text": thinking}]
                parts.append({"type": "thinking", "thinking": inner})
            if text:
                parts.append({"type": "text", "text": text})
            return {"content": parts}
        said: dict[str, Any] = {}
        if thinking:
            said[self.rng.choice(("reasoning", "reasoning_content"))] = thinking
        if text:
            said["content"] = text
        return said

    def _cut(self, text: str) -> list[str]:
        """A text in pieces; with ``split_pairs`` also between the halves of a character."""
        if not text:
            return []
        units = [text]
        if "split_pairs" in self.habits and "parts" not in self.habits:
            wide = text.encode("utf-16-le", "surrogatepass")
            step = self.rng.choice((2, 4, 6))
            units = [
                wide[at : at + step].decode("utf-16-le", "surrogatepass")
                for at in range(0, len(wide), step)
            ]
        elif len(text) > 1:
            at = self.rng.randrange(1, len(text))
            units = [text[:at], text[at:]]
        return units

    def _chunks(self) -> list[dict[str, Any]]:
        deltas = [self._said("", one) for one in self._cut(self.thinking)]
        deltas += [self._said(one, "") for one in self._cut(self.text)]
        deltas += self._call_deltas()
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunks = [self._body([first], **self._prompt())]
        chunks += [self._body([self._choice(delta)]) for delta in deltas]
        if "null_choices" in self.habits:
            chunks.insert(self.rng.randint(1, len(chunks)), {"id": "x", "choices": None})
        finish = self._finish()
        last = self._choice({}, finish_reason=finish)
        chunks.append(self._body([last]))
        self._spoil(chunks)
        chunks.append(self._body([], usage=self._usage()))
        return chunks

    def _spoil(self, chunks: list[dict[str, Any]]) -> None:
        foreign = {"index": 0, "delta": {"content": "FOREIGN"}, "finish_reason": None}
        at = self.rng.randint(1, len(chunks) - 1)
        if "error_choice" in self.spoils:
            chunks[-1]["choices"][0]["error"] = {"message": "out of memory"}
        if "other_id" in self.spoils:
            chunks.insert(at, self._body([foreign]) | {"id": "y"})
        if "other_prompt" in self.spoils:
            chunks.insert(at, self._body([foreign], prompt_token_ids=[9]))
            if self.external:
                chunks[0]["prompt_token_ids"] = [11, 12, 13]
        if "other_choice" in self.spoils:
            chunks.insert(at, self._body([foreign | {"index": 1}]))
        if "error_event" in self.spoils:
            error = {"error": {"message": "out of memory", "code": 500}}
            shapes = (error, {"object": "error", "message": "out of memory"}, {"detail": "gone"})
            chunks.insert(self.rng.randint(0, len(chunks)), self.rng.choice(shapes))

    def _call_deltas(self) -> list[dict[str, Any]]:
        made = [self._pieces(index, *call) for index, call in enumerate(self.calls)]
        if "alternating" not in self.habits:
            return [self._wrapped(piece) for pieces in made for piece in pieces]
        queues = [pieces for pieces in made if pieces]
        ordered: list[dict[str, Any]] = []
        for pieces in queues:  # each call begins in its turn
            ordered.append(pieces.pop(0))
        while any(queues):
            ordered.append(self.rng.choice([one for one in queues if one]).pop(0))
        return [self._wrapped(piece) for piece in ordered]

    def _wrapped(self, piece: dict[str, Any]) -> dict[str, Any]:
        if "legacy_call" in self.habits:
            return {"function_call": piece["function"]}
        if "flat_calls" in self.habits and "objects" in self.habits:
            return {"tool_calls": [{**piece, **piece.pop("function")}]}
        return {"tool_calls": [piece]}

    def _arguments(self, index: int, arguments: dict[str, Any]) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        if "spaces" in self.habits:
            text = json.dumps(arguments, indent=1) + "\n"
        if "merged" in self.spoils and index == 0:
            text += '{"city":"Rome"}'
        return text

    def _pieces(self, index: int, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        text: Any = self._arguments(index, arguments)
        cuts: list[Any] = [text]
        if "objects" in self.habits and not (index == 0 and "merged" in self.spoils):
            cuts = [arguments]
        elif "pieces" in self.habits or "alternating" in self.habits:
            cuts = ["", *self._cut(text)]
        shown = None if "nameless" in self.spoils and index == 0 else name
        made: list[dict[str, Any]] = []
        for at, cut in enumerate(cuts):
            function: dict[str, Any] = {"arguments": cut}
            piece: dict[str, Any] = {"type": "function", "function": function}
            if "no_index" not in self.habits:
                piece["index"] = 0 if "same_index" in self.habits else index
            first = at == 0
            if "no_ids" not in self.habits and (first or "ids_on_each_piece" in self.habits):
                piece["id"] = f"call_{index}"
            late = "late_names" in self.habits and len(cuts) > 1
            if late and first:
                function["name"] = self.rng.choice(("", None))
            elif at == int(late) or ("names_on_each_piece" in self.habits and not late):
                function["name"] = shown
            made.append(piece)
        return made

    def _whole(self) -> dict[str, Any]:
        """A whole body; calls are whole in it."""
        self.habits -= {"alternating", "pieces", "late_names", "split_pairs", "null_choices"}
        message = self._said(self.text, self.thinking) | {"role": "assistant"}
        pieces = [self._pieces(index, *call)[0] for index, call in enumerate(self.calls)]
        wrapped = [self._wrapped(piece) for piece in pieces]
        if "legacy_call" in self.habits and wrapped:
            message |= wrapped[0]
        elif wrapped:
            message["tool_calls"] = [one["tool_calls"][0] for one in wrapped]
        choice = self._choice(message, "message", finish_reason=self._finish())
        choices = [choice]
        if "other_choice" in self.spoils:
            choices.append({"index": 1, "message": {"content": "FOREIGN"}, "finish_reason": "stop"})
        if "error_choice" in self.spoils:
            choice["error"] = {"message": "out of memory"}
        body = self._body(choices, usage=self._usage(), **self._prompt())
        if "error_event" in self.spoils:
            body["error"] = {"message": "out of memory"}
        if self.spoils & {"other_id", "other_prompt", "junk"}:
            body["choices"] = 7  # these are of streams alone
        return body


def judged(theatre: Any, reply: Reply, got: Any) -> None:
    """The rule that every reply is held to."""
    assert b"Traceback" not in got.body
    assert b"the proxy failed" not in got.body
    row = theatre.reader.call(got.call_id)
    delivered = [(call.name, call.arguments) for call in got.calls]
    if reply.spoils:
        assert row.status is not CallStatus.COMPLETE, reply
        assert row.reason, reply
        assert "FOREIGN" not in got.body.decode(), reply
        for call in delivered:
            assert call in reply.calls, (call, reply)
        assert got.error or row.status is CallStatus.QUARANTINED
        return
    assert (got.status, got.error) == (200, None), (got.error, reply)
    assert row.status is CallStatus.COMPLETE, (row.reason, reply)
    assert delivered == reply.calls, reply
    # A dialect may keep blank text beside calls from its client.
    assert got.text in (reply.text, reply.text.strip() if reply.calls else reply.text), reply
    assert got.thinking == reply.thinking, reply
    (recorded,) = row.replies
    assert (recorded.content or "", recorded.reasoning or "") == (reply.text, reply.thinking)
    calls = [(call.name, json.loads(call.arguments or "{}")) for call in recorded.tool_calls]
    assert calls == reply.calls


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = Theatre(tmp_path_factory.mktemp("odd"), failures_to_eject=3)
    yield found
    found.close()


REPLIES = st.lists(
    st.tuples(
        st.integers(0, 2**48),
        st.frozensets(st.sampled_from(HABITS), max_size=6),
        st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(SPOILS), max_size=2)),
    ),
    min_size=AT_ONCE,
    max_size=AT_ONCE,
)
PHASES = (Phase.explicit, Phase.generate)
"""A seed cannot be made simpler, so a failing reply is shown as it is."""
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def check(theatre: Any, made: list[tuple[int, frozenset[str], frozenset[str]]]) -> None:
    replies = [Reply(*one) for one in made]
    asked = [(one.sent(), one.dialect, one.stream, one.external) for one in replies]
    for reply, got in zip(replies, theatre.ask_all(asked), strict=True):
        judged(theatre, reply, got)


@pytest.mark.timeout(600)
@settings(
    max_examples=CI // AT_ONCE,
    database=None,
    derandomize=True,
    phases=PHASES,
    suppress_health_check=SLOW,
)
@given(made=REPLIES)
def test_an_odd_reply_is_read_right_or_is_an_error(theatre: Any, made: Any) -> None:
    check(theatre, made)


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(max_examples=LONG // AT_ONCE, database=None, phases=PHASES, suppress_health_check=SLOW)
@given(made=REPLIES)
def test_fifty_thousand_odd_replies_are_read_right_or_are_errors(theatre: Any, made: Any) -> None:
    check(theatre, made)
