"""A made-up world of agents that share one session, through all that harnesses do to a history.

Whatever happens in whatever order, each request finds its true parent, and every path reads back as
the engine saw and sampled it.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import Link, Turn
from bridle.proxy.wire.canonical import Message, Minted, Request, ToolCall
from bridle.store.reading.summaries import SUMMARY_LENGTH
from bridle.store.records import BreakReason, CallStatus, Choice, VersionRun, new_id
from bridle.store.tree import TokenTree

REWRITES = runpy.run_path(str(Path(__file__).with_name("rewrites.py")))
rewritten, used_part = REWRITES["rewritten"], REWRITES["used_part"]

SUMMARY = "All that was found so far, in order, with nothing of weight left out of it"
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")
)

OPERATIONS = (
    "ask", "ask", "ask", "answer", "answer", "answer", "answer", "fail", "cut", "discard",
    "sample", "edit", "compact", "condense", "instruct", "equip", "fork", "restart",
)  # fmt: skip


@dataclass
class Agent:
    """An agent as it sees itself: its history, and the call that its last reply came from."""

    name: str | None
    system: str
    tools: tuple[dict[str, Any], ...]
    history: list[Message]
    parents: tuple[str, ...] = ()
    """The call that the next request continues; several where samples said the very same."""
    expected: BreakReason | None = None
    """The reason for which the next request will be a break."""
    retry: tuple[str, CallStatus] | None = None
    """The call that the next request asks again, and how it ended."""
    waiting: bool = False
    stuck: bool = False
    """True if the last request must be repeated as it is."""
    drops_text: bool = False
    """True if its harness sends no text beside tool calls."""
    own_ids: bool = False
    """True if its harness makes call ids of its own and echoes none of ours."""


@dataclass
class Pending:
    """A request that was placed and is not answered yet."""

    agent: Agent
    link: Link
    prompt: list[int]
    sample: bool = False


@dataclass
class World:
    talk: SimpleNamespace
    held: Session
    agents: list[Agent] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    paths: dict[str, list[int]] = field(default_factory=dict)
    """The ids of prompt and reply of each answered call, as the engine knew them."""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    replies: dict[str, Message] = field(default_factory=dict)
    """The replies as they were sent: with the opaque values that a harness may echo."""
    counter: int = 0
    rows: Any = None
    """The calls as the store has them."""

    def unique(self, word: str) -> str:
        self.counter += 1
        return f"{word} {self.counter:05d}"

    def agent(self, number: int, rng: Random) -> Agent:
        while len(self.agents) <= number:
            n = len(self.agents)
            kind = rng.choice(["own system", "own tools", "own task", "own name"])
            self.agents.append(
                Agent(
                    name=f"agent-{n}" if kind == "own name" else None,
                    system=f"You are agent {n}." if kind == "own system" else "You help.",
                    tools=TOOLS[: 1 + n % 2] if kind == "own tools" else TOOLS,
                    history=[Message("user", self.unique("Task"))],
                    drops_text=rng.random() < 0.2,
                    own_ids=rng.random() < 0.25,
                )
            )
        return self.agents[number]

    # — what agents do —

    def ask(self, agent: Agent, rng: Random, *, sample: bool = False) -> None:
        request = Request(
            dialect="chat",
            model="m",
            messages=(
                Message("system", self.head(agent, rng)),
                *rewritten(agent.history, rng, own_ids=agent.own_ids, drops_text=agent.drops_text),
            ),
            tools=agent.tools,
        )
        link = self.held.find(request, agent.name)
        found = () if link.parent is None else (link.parent.call_id,)
        assert set(found) <= set(agent.parents), (found, agent.parents, link)
        assert bool(found) == bool(agent.parents)
        agent.parents = found
        self.rows.begin(link)
        again, _ = self.rows.repetition(link)
        assert again == agent.retry
        allowed = {agent.expected}
        if agent.expected in (BreakReason.COMPACTED, BreakReason.EDITED):
            # How much of a history must go before its edit is called a compaction is a matter of
            # degree.
            allowed = {BreakReason.COMPACTED, BreakReason.EDITED}
        assert link.break_reason in allowed
        if link.base is not None:
            assert link.base.path_ids().tolist() == self.paths[link.base.call_id]
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
        if link.base is not None:
            path = self.paths[link.base.call_id]
            kept = len(path) if rng.random() < 0.7 else rng.randrange(len(path))
            prompt = path[:kept] + prompt
        agent.waiting = True
        self.pending.append(Pending(agent, link, prompt, sample))

    def head(self, agent: Agent, rng: Random) -> Any:
        mark = f"x-anthropic-billing-header: cch={rng.randrange(99)};"
        return rng.choice(
            [
                agent.system,
                f"{mark}\n{agent.system}",
                [{"type": "text", "text": mark}, {"type": "text", "text": agent.system}],
                [{"type": "text", "text": agent.system, "cache_control": {"type": "ephemeral"}}],
            ]
        )

    def answer(
        self,
        asked: Pending,
        rng: Random,
        status: CallStatus,
        said: str = "Reply",
        words: str | None = None,
    ) -> Turn:
        """Record the engine's answer, which nobody has read yet.

        ``words`` are all that it contains, when they are given.
        """
        call_id = new_id("call")
        minted = Minted(call_id=call_id, created=0, response_id="", model="m")
        calls = rng.choice([0, 0, 1, 2]) if words is None and said == "Reply" else 0
        text = words or f"{self.unique(said)}\nwith some more words{rng.choice(['', ' ', chr(10)])}"
        message = Message(
            "assistant",
            rng.choice([text, None]) if calls else text,
            reasoning=rng.choice([None, "Let me think.\n"]),
            tool_calls=tuple(
                ToolCall(
                    minted.tool_call_id(index),
                    rng.choice("fg"),
                    json.dumps({"n": self.unique("n"), "é": 1.0, "a": [True, None]}),
                )
                for index in range(calls)
            ),
        )
        sampled = [rng.randrange(1000) for _ in range(rng.randrange(1, 6))]
        replies = [(message, np.array(sampled, np.uint32))]
        turn = self.record(call_id, asked.link, replies, status, asked.prompt)
        self.prompts[call_id] = asked.prompt
        self.paths[call_id] = asked.prompt + sampled
        self.replies[call_id] = msgspec.structs.replace(message, anchors=(minted.signature(0),))
        return turn

    def record(self, call_id, link, replies=(), status=CallStatus.COMPLETE, prompt=None) -> Turn:
        turn = self.talk.ended(
            self.held, call_id, link, replies, status=status, prompt_token_ids=prompt
        )
        self.turns.append(turn)
        self.rows.end(turn, link)
        return turn

    def used(self, agent: Agent, turn: Turn, rng: Random, *, part: bool = False) -> None:
        """The agent takes the reply (or a part of it) into its history and goes on from it."""
        message = self.replies[turn.call_id]
        if part:
            message = used_part(message, rng)
            agent.expected = BreakReason.TRUNCATED
        else:
            agent.expected = None
        agent.parents, agent.retry = (turn.call_id,), None
        agent.history.append(message)
        agent.history += [
            Message("tool", self.unique("Result"), tool_call_id=call.id)
            for call in message.tool_calls
        ]
        if not message.tool_calls or rng.random() < 0.2:
            agent.history.append(Message("user", self.unique("And then?")))

    def restart(self) -> None:
        """Another proxy takes over with what the store holds."""
        self.held = self.talk.restarted(self.held, self.turns)
        self.turns = [self.held.turns.turns[turn.call_id] for turn in self.turns]


# — one operation —


def happen(world: World, operation: str, number: int, salt: int) -> None:
    rng = Random(salt)
    if operation == "restart":
        world.restart()
        return
    agent = world.agent(number, rng)
    asked = next((one for one in world.pending if one.agent is agent), None)
    if operation in ("answer", "fail", "cut", "discard"):
        if asked is not None:
            world.pending.remove(asked)
            end(world, asked, operation, rng)
    elif asked is not None:
        return
    elif operation == "ask":
        world.ask(agent, rng)
    elif not agent.stuck:
        change(world, agent, operation, rng)


def end(world: World, asked: Pending, operation: str, rng: Random) -> None:
    """A pending request gets its answer, or none."""
    agent = asked.agent
    agent.waiting = False
    if operation == "fail":
        status = rng.choice([CallStatus.FAILED, CallStatus.INTERRUPTED])
        turn = world.record(new_id("call"), asked.link, status=status)
        agent.stuck, agent.retry = True, (turn.call_id, status)
        return
    status = CallStatus.PARTIAL if operation == "cut" else CallStatus.COMPLETE
    turn = world.answer(asked, rng, status)
    used = operation == "answer" or (operation == "cut" and rng.random() < 0.7)
    agent.stuck, agent.retry = not used, (turn.call_id, status)
    if used:
        reply = world.replies[turn.call_id]
        divisible = len(reply.tool_calls) != 1 or reply.content
        part = operation == "cut" and divisible and rng.random() < 0.6
        world.used(agent, turn, rng, part=part)


def change(world: World, agent: Agent, operation: str, rng: Random) -> None:
    """Something other than the next turn."""
    replied = [n for n, message in enumerate(agent.history) if message.role == "assistant"]
    if operation == "sample":
        sample(world, agent, rng)
    elif agent.expected is not None or not replied:
        return
    elif operation == "fork":
        if len(world.agents) < 4:
            name = rng.choice([agent.name, f"agent-{len(world.agents)}"])
            child = Agent(name, agent.system, agent.tools, list(agent.history), agent.parents)
            child.history.append(Message("user", world.unique("You are a sub-agent:")))
            world.agents.append(child)
    elif operation == "edit":
        edit(world, agent, replied, rng)
    elif operation == "compact":
        compact(world, agent, rng)
    elif operation == "condense":
        condense(world, agent, replied, rng)
    elif operation == "instruct":
        agent.system = world.unique("You are someone else:")
        agent.expected = BreakReason.SYSTEM_CHANGED
    elif operation == "equip":
        more = {"type": "function", "function": {"name": world.unique("tool")}}
        agent.tools = (*agent.tools, more)
        agent.expected = BreakReason.TOOLS_CHANGED


def sample(world: World, agent: Agent, rng: Random) -> None:
    """Several answers to one request at once, now and then in the same words; one is used."""
    for _ in range(rng.randrange(2, 4)):
        world.ask(agent, rng, sample=True)
    several = [one for one in world.pending if one.agent is agent]
    world.pending = [one for one in world.pending if one.agent is not agent]
    words = f"{world.unique('All say')} this." if rng.random() < 0.4 else None
    turns = [world.answer(one, rng, CallStatus.COMPLETE, words=words) for one in several]
    agent.waiting = agent.stuck = False
    world.used(agent, rng.choice(turns), rng)
    if words is not None:
        # Nothing but the words comes back: which of the equals was used cannot be told.
        last = max(n for n, message in enumerate(agent.history) if message.role == "assistant")
        agent.history[last] = msgspec.structs.replace(agent.history[last], anchors=())
        agent.parents = tuple(turn.call_id for turn in turns)


def edit(world: World, agent: Agent, replied: list[int], rng: Random) -> None:
    """A turn between replies is changed after the fact."""
    editable = [
        n
        for n, message in enumerate(agent.history)
        if message.role != "assistant" and replied[0] < n < replied[-1]
    ]
    if editable:
        n = rng.choice(editable)
        agent.history[n] = msgspec.structs.replace(
            agent.history[n], content=world.unique("[cleared]")
        )
        agent.expected = BreakReason.EDITED


def compact(world: World, agent: Agent, rng: Random) -> None:
    """The agent asks for a summary and starts anew from it."""
    agent.history.append(Message("user", world.unique("Sum up.")))
    world.ask(agent, rng)
    asked = world.pending.pop()
    turn = world.answer(asked, rng, CallStatus.COMPLETE, SUMMARY)
    agent.waiting = False
    summary = world.replies[turn.call_id].content
    agent.history = [Message("user", f"This is continued. Summary:\n\n{summary}\n\nGo on.")]
    agent.parents, agent.retry = (turn.call_id,), None
    agent.expected = BreakReason.COMPACTED


def condense(world: World, agent: Agent, replied: list[int], rng: Random) -> None:
    """The middle of the history makes room for a note; the latest turn stays."""
    latest = agent.history[replied[-1]]
    if agent.own_ids and said(latest) < SUMMARY_LENGTH:
        return  # a short turn without ids or history: nothing tells whose it is
    if len(replied) >= 4 and latest.tool_calls:
        note = Message("user", world.unique("What was dropped:"))
        agent.history = [note, *agent.history[replied[-1] :]]
        agent.expected = BreakReason.COMPACTED


def said(reply: Message) -> int:
    """Count the characters of text and arguments of a reply."""
    return len((reply.content or "").strip()) + sum(len(c.arguments) for c in reply.tool_calls)


def live(talk: SimpleNamespace, events: Sequence[tuple[str, int, int]]) -> None:
    world = World(talk, talk.new_session(), rows=talk.Record())
    for operation, number, salt in events:
        happen(world, operation, number, salt)
    for turn in world.turns:
        if turn.call_id in world.paths:
            assert turn.path_ids().tolist() == world.paths[turn.call_id]
    branches_are_what_the_engine_knew(world)


def branches_are_what_the_engine_knew(world: World) -> None:
    """Check that the store's token tree of these calls reads back each call's prompt and reply.

    Each of its ends is one of them, and no token stands in it twice.
    """
    tree, spans = TokenTree("session"), []
    for turn in world.turns:
        if turn.call_id in world.paths:
            sampled = turn.tip().token_ids
            choice = Choice(
                sampled, np.zeros(len(sampled), np.float32), (VersionRun(0, 1),), "stop"
            )
            prompt = np.array(world.prompts[turn.call_id], np.uint32)
            spans += tree.grow(turn.call_id, prompt, [choice]).spans
    again = TokenTree("session", spans)
    for call_id, path in world.paths.items():
        assert again.path(f"{call_id}.s0", len(path)).tolist() == path
    above = {(span.parent_id, span.start) for span in spans}
    ends = [span for span in spans if not any(p == span.id and s == span.end for p, s in above)]
    known = {tuple(path) for path in world.paths.values()}
    for span in ends:
        assert tuple(again.path(span.id, span.end).tolist()) in known


EVENTS = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.integers(0, 2**20))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, min_size=10, max_size=80))
def test_every_request_finds_its_true_parent(talk, events) -> None:
    live(talk, events)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, min_size=10, max_size=300))
def test_every_request_finds_its_true_parent_at_length(talk, events) -> None:
    live(talk, events)
