"""Fixtures of the lineage tests: a tokenizer per template family, and a session to talk in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.continuation import Continuer
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.session import trails
from bridle.proxy.session.loading import load_calls
from bridle.proxy.session.search import Search
from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import Link, Turn
from bridle.proxy.wire.canonical import Message, Minted, Request, ToolCall
from bridle.recipes.models.tiny_tokenizer import SPECIAL_TOKENS, train_tokenizer
from bridle.reconstruct.breaks import reasons
from bridle.reconstruct.repeats import Repetition, repetitions
from bridle.store.records import (
    BreakReason,
    CallStatus,
    Choice,
    Conversation,
    LineageState,
    SessionRecord,
    Span,
    SpanKind,
    TokenIds,
    new_id,
)

TEMPLATES = Path(__file__).parent / "templates"

TEXTS = [
    "The quick brown fox looks up a word in the library and computes twelve times thirty-four.",
    'def look_up(word: str) -> dict: return {"name": "look_up", "arguments": {"word": word}}',
    "Une maison de café — ☕ naïve façade, Straße, 北京, привет.",
    Path(__file__).read_text(),
    (Path(__file__).parents[2] / "proxy" / "wire" / "canonical.py").read_text(),
]


@dataclass(frozen=True)
class Family:
    """The tokens that a family of templates needs of its tokenizer."""

    special_tokens: tuple[str, ...]
    eos_tokens: tuple[str, ...]


_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_MISTRAL: tuple[str, ...] = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL += ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_DEEPSEEK: tuple[str, ...] = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
_DEEPSEEK += ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
_DEEPSEEK += ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")
_DEEPSEEK += ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")

FAMILIES = {
    "chatml_kept": Family(SPECIAL_TOKENS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family(SPECIAL_TOKENS, ("<|im_end|>", "<|endoftext|>")),
    "llama3": Family(
        ("<|end_of_text|>", "<|begin_of_text|>", *_LLAMA),
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ),
    "mistral": Family(("<unk>", "<s>", "</s>", *_MISTRAL), ("</s>",)),
    "gemma": Family(
        ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>")
    ),
    "glm": Family(("<|endoftext|>", *_GLM), ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "deepseek": Family(
        ("<pad>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", *_DEEPSEEK),
        ("<｜end▁of▁sentence｜>",),
    ),
    "harmony": Family(("<|endoftext|>", *_HARMONY), ("<|return|>", "<|call|>", "<|endoftext|>")),
}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A trained tokenizer with template and generation config, by family name."""
    made = {}
    for name, family in FAMILIES.items():
        directory = tmp_path_factory.mktemp(name)
        train_tokenizer(
            directory,
            TEXTS,
            vocab_size=1024,
            template=(TEMPLATES / f"{name}.jinja").read_text(),
            special_tokens=family.special_tokens,
            eos_token=family.eos_tokens[0],
        )
        tokenizer = Tokenizer(directory)
        eos = [tokenizer.token_id(token) for token in family.eos_tokens]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        made[name] = tokenizer
    return made


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each family's tokenizer in turn."""
    return tokenizers[request.param]


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search that goes on from a trail finds what a search of the whole request finds."""
    find = Session.find

    def both(self: Session, request: Request, agent: str | None = None, *rest: Any) -> Link:
        link = find(self, request, agent, *rest)
        if link.rule != "token_prefix":
            assert structs.replace(link, written=None) == Search(self.turns, request, agent).link()
        return link

    monkeypatch.setattr(trails, "WORTH_KEEPING", 0)
    monkeypatch.setattr(Session, "find", both)


def new_session() -> Session:
    """A session as the proxy keeps it."""
    return Session(SessionRecord(id=new_id("ses"), created_at=0.0))


def ended(
    session: Session,
    call_id: str,
    link: Link,
    replies: Sequence[tuple[Message, TokenIds]] = (),
    *,
    status: CallStatus = CallStatus.COMPLETE,
    prompt_token_ids: Sequence[int] | TokenIds | None = None,
) -> Turn:
    """A call of the session that is over and remembered, as the proxy does it."""
    messages = [message for message, _ in replies]
    if prompt_token_ids is None:
        turn = session.turn(call_id, link, status, messages)
    else:
        prompt = np.asarray(prompt_token_ids, dtype=np.uint32)
        choices = [
            Choice(np.asarray(ids, dtype=np.uint32), np.zeros(len(ids), np.float32), (), None)
            for _, ids in replies
        ]
        growth, _ = session.grow(call_id, link, choices, prompt)
        turn = session.turn(call_id, link, status, messages, growth, len(prompt))
    session.add(turn)
    STATES[call_id] = link.state()
    return turn


STATES: dict[str, LineageState] = {}
"""The store's state of each call's link, by call id."""


def recorded(turn: Turn) -> SimpleNamespace:
    """The turn as its row in the store."""
    state = msgspec.msgpack.encode(STATES[turn.call_id])
    return SimpleNamespace(
        id=turn.call_id,
        session_id=turn.session_id,
        dialect="chat",
        parent_call_id=turn.parent_call_id,
        replayed_call_id=None,
        status=turn.status,
        notes=(),
        replies=tuple(choice.message for choice in turn.choices),
        conversation=Conversation(
            (), length=1, lineage=msgspec.msgpack.decode(state, type=LineageState)
        ),
        prompt_tokens=None if turn.prompt is None else turn.prompt.position,
        prompt_span_id=None if turn.prompt is None else turn.prompt.node.id,
    )


def restarted(session: Session, turns: Sequence[Turn]) -> Session:
    """The session as a restarted proxy reads it from the store, which has these calls."""
    spans = [
        Span(
            node.id,
            session.id,
            node.id.rpartition(".")[0],
            node.parent.id,
            node.start,
            SpanKind.OBSERVED if node.id.endswith("o") else SpanKind.SAMPLED,
            node.token_ids,
        )
        for node in session.tree.nodes.values()
        if node.id is not None and node.parent is not None
    ]
    again = new_session()
    load_calls(again, map(recorded, turns), spans)  # type: ignore[arg-type]
    return again


class Record:
    """The calls of a session as rows, in the order of their start."""

    def __init__(self) -> None:
        self.clock = 0
        self.asked: dict[int, int] = {}
        """The time of each request, by the identity of its link."""
        self.rows: list[SimpleNamespace] = []

    def begin(self, link: Link) -> None:
        """A request is sent."""
        self.clock += 1
        self.asked[id(link)] = self.clock

    def end(self, turn: Turn, link: Link) -> None:
        """Its call is over."""
        self.clock += 1
        row = recorded(turn)
        row.started_at, row.ended_at = self.asked[id(link)], self.clock
        row.conversation = Conversation(link.tail, length=1, lineage=link.state())
        self.rows.append(row)

    def repetition(self, link: Link) -> tuple[tuple[str, CallStatus] | None, str | None]:
        """The call that the request of ``link`` asks again and its end, and the one left out."""
        asked = SimpleNamespace(
            id="asked",
            status=CallStatus.COMPLETE,
            started_at=self.asked[id(link)],
            ended_at=None,
            parent_call_id=None if link.parent is None else link.parent.call_id,
            replies=(),
            conversation=Conversation(link.tail, length=1, lineage=link.state()),
        )
        rows = [*sorted(self.rows, key=lambda row: row.started_at), asked]
        found = repetitions(rows).get("asked", Repetition(None, None))  # type: ignore[arg-type]
        again = None if found.asked is None else (found.asked.id, found.asked.status)
        return again, None if found.left_out is None else found.left_out.id


class Talk:
    """A session to talk in: requests are placed, replies are minted and remembered."""

    def __init__(self) -> None:
        self.held = new_session()
        self.record = Record()

    def ask(self, *messages: Message, agent: str | None = None, **fields: Any) -> Link:
        """Find the place of a request with these messages."""
        link = self.held.find(request(*messages, **fields), agent)
        self.record.begin(link)
        return link

    def retry_of(self, link: Link) -> str | None:
        """The id of the call that is asked again."""
        again, _ = self.record.repetition(link)
        return None if again is None else again[0]

    def left_out(self, link: Link) -> str | None:
        """The id of the call whose reply the request leaves out."""
        return self.record.repetition(link)[1]

    def answer(
        self,
        link: Link,
        text: str | None = None,
        *calls: tuple[str, str],
        reasoning: str | None = None,
        status: CallStatus = CallStatus.COMPLETE,
        prompt_token_ids: Sequence[int] | None = (1, 2, 3),
    ) -> Turn:
        """The reply to ``link``'s request, with minted tool-call ids, remembered."""
        call_id = new_id("call")
        message = reply(call_id, text, *calls, reasoning=reasoning)
        turn = ended(
            self.held,
            call_id,
            link,
            [(message, _ids(call_id))],
            status=status,
            prompt_token_ids=prompt_token_ids,
        )
        self.record.end(turn, link)
        return turn

    @staticmethod
    def said(turn: Turn, **changes: Any) -> Message:
        """The turn's reply as a harness echoes it."""
        return msgspec.structs.replace(turn.choices[0].message, **changes)

    @staticmethod
    def results(turn: Turn, *texts: str) -> list[Message]:
        """Results of the turn's calls."""
        calls = turn.choices[0].message.tool_calls
        return [
            Message("tool", text, tool_call_id=call.id)
            for call, text in zip(calls, texts, strict=True)
        ]

    def fail(self, link: Link, status: CallStatus = CallStatus.FAILED) -> Turn:
        """A call that got no reply."""
        turn = ended(self.held, new_id("call"), link, status=status)
        self.record.end(turn, link)
        return turn


def request(*messages: Message, **fields: Any) -> Request:
    """A chat request with these messages."""
    return Request(dialect="chat", model="m", messages=messages, **fields)


def reply(
    call_id: str, text: str | None, *calls: tuple[str, str], reasoning: str | None = None
) -> Message:
    """A reply with minted tool-call ids."""
    minted = Minted(call_id=call_id, created=0, response_id=call_id, model="m")
    return Message(
        "assistant",
        text,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(minted.tool_call_id(index), name, arguments)
            for index, (name, arguments) in enumerate(calls)
        ),
    )


def _ids(call_id: str) -> TokenIds:
    return np.frombuffer(call_id.encode(), dtype=np.uint8).astype(np.uint32)


@pytest.fixture
def session() -> Talk:
    return Talk()


@pytest.fixture(scope="session")
def talk() -> SimpleNamespace:
    """The builders above, for tests that need them by name."""
    return SimpleNamespace(
        request=request,
        reply=reply,
        ended=ended,
        new_session=new_session,
        restarted=restarted,
        Talk=Talk,
        Record=Record,
    )


class Policy:
    """A stand-in for the engine that remembers every call in a session.

    It renders what it must, and samples what it is given, in the template's own words.
    """

    def __init__(self, tokenizer: Tokenizer, *, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.continuer = Continuer(tokenizer)
        self.held = new_session()
        self.messages: list[Message] = []
        """The conversation as a harness that echoes verbatim would send it."""

    def rendered(self, messages: Sequence[Message] | None = None, **arguments: Any) -> str:
        """The full rendering of ``messages`` (of the conversation so far)."""
        chats = [message.to_chat() for message in messages or self.messages]
        return self.tokenizer.render(chats, list(self.tools) or None, **arguments)

    def ask(self, *new: Message, **fields: Any) -> tuple[Link, Request, CallPrompt]:
        """The link and the prompt of the conversation after ``new`` messages."""
        self.messages += new
        asked = request(*self.messages, tools=self.tools, **fields)
        link = self.held.find(asked)
        return link, asked, self.continuer.prompt(link, asked)

    def prompt_ids(self, prompt: CallPrompt) -> list[int]:
        if prompt.token_ids is not None:
            return [int(token_id) for token_id in prompt.token_ids]
        return self.tokenizer.encode(self.rendered())

    def words(self, message: Message) -> str:
        """Return the text that the policy would generate for ``message``, end of turn included."""
        user = Message("user", "x")
        start = self.rendered([user])
        whole = self.rendered([user, message], add_generation_prompt=False)
        assert whole.startswith(start)
        said = whole[len(start) :].removesuffix("\n")
        ends = [self.tokenizer.backend.id_to_token(i) for i in self.tokenizer.eos_token_ids]
        if any(end is not None and said.endswith(end) for end in ends):
            return said
        # Nothing ends a turn in this template: the next speaker's token does.
        return said + ("<|observation|>" if message.tool_calls else "<|user|>")

    def reply(
        self,
        text: str | None,
        *calls: tuple[str, str],
        reasoning: str | None = None,
        sampled: Sequence[int] | None = None,
        status: CallStatus = CallStatus.COMPLETE,
        new: Sequence[Message] = (),
        **fields: Any,
    ) -> Turn:
        """One whole call: ``new`` messages, then this reply, sampled as ``sampled`` if given."""
        link, _, prompt = self.ask(*new, **fields)
        call_id = new_id("call")
        message = reply(call_id, text, *calls, reasoning=reasoning)
        if sampled is None:
            sampled = self.tokenizer.encode(self.words(message))
        turn = ended(
            self.held,
            call_id,
            link,
            [(message, np.asarray(sampled, dtype=np.uint32))],
            status=status,
            prompt_token_ids=self.prompt_ids(prompt),
        )
        self.messages.append(message)
        return turn

    def breaks(self, link: Link, used: Sequence[int]) -> tuple[BreakReason, ...]:
        """Return why the ids that the engine ``used`` do not continue the parent's, if they do not.

        The reason is the proxy's, or else the record's.
        """
        before = list(self.held.turns.turns.values())
        turn = ended(self.held, new_id("call"), link, prompt_token_ids=used)
        growth, _ = self.held.grow("call_again", link, [], np.asarray(used, dtype=np.uint32))
        reason, _ = CallPrompt(None).verdict(link, growth)
        if reason is not BreakReason.UNEXPLAINED:
            return () if reason is None else (reason,)
        rows = {one.call_id: recorded(one) for one in [*before, turn]}
        return reasons(rows[turn.call_id], rows, self.held.tree)  # type: ignore[arg-type]

    def results(self, *texts: str) -> list[Message]:
        """Results of the calls of the latest reply."""
        calls = self.messages[-1].tool_calls
        return [
            Message("tool", text, tool_call_id=call.id, name=call.name)
            for call, text in zip(calls, texts, strict=True)
        ]


@pytest.fixture(scope="session")
def policy() -> type[Policy]:
    return Policy
