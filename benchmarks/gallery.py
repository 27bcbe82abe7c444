"""A store with sessions of every sort to look at.

It has groups with rewards, breaks, sub-agents, side calls, failures, and training runs with
metrics. Its texts are Python's own documentation.

``bridle bench viewer`` measures the pages over it, and the tests of the pages read it. The same
arguments give the same conversations.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bridle.bench.corpus import Corpus, corpus
from bridle.engine.contract.tokenizer import token_bytes
from bridle.reconstruct.audit import audit, audit_session
from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    BreakReason,
    CallKind,
    CallStatus,
    Choice,
    Conversation,
    LineageState,
    Message,
    Note,
    PolicyRecord,
    RequestDigests,
    RunRecord,
    Sampler,
    SessionRecord,
    TaskRecord,
    ToolCall,
    VersionRun,
    new_id,
)
from bridle.store.reward import Reward, RewardSource
from bridle.store.schema.database import migrate
from bridle.store.tree import TokenTree
from bridle.store.writing.vocabularies import keep_vocabulary
from bridle.store.writing.writer import Writer

EPOCH: Final = 1_790_000_000.0
GROUP: Final = 4
"""Number of sessions per group."""
HARNESSES: Final = ("codex", "claude-code", "qwen-code", "langchain")
_TURN_S: Final = 3.0


def fill(store: str, sessions: int, *, turns: int = 6, judged: bool = True) -> list[str]:
    """Record ``sessions`` sessions in a new store, oldest first, and return their ids.

    They are those of two training runs. They are judged too.
    """
    migrate(store)
    vocabulary = keep_vocabulary(store, token_bytes(corpus().tokenizer))
    with Writer(store) as writer:
        runs = [_run(writer, number, sessions) for number in (1, 2)]
        made = []
        for number in range(sessions):
            run = runs[0] if number < sessions // 2 else runs[1]
            made.append(_session(writer, run, number, sessions, turns, vocabulary))
        for number, run in enumerate(runs, start=1):
            writer.finish_run(run, "completed", EPOCH + 100_000 * number)
    if judged:
        with Reader(store) as reader:
            for _ in audit(reader):
                pass
    return made


def add_session(store: str, turns: int) -> str:
    """Add one session of ``turns`` turns to a store that :func:`fill` has made; return its id."""
    with Reader(store) as reader:
        held = list(reader.sessions())
        run = reader.runs()[-1].id
    with Writer(store) as writer:
        number, known = len(held), held[-1].vocabulary
        added = _session(writer, run, number, number + 2, turns, known)
    with Reader(store) as reader:
        audit_session(reader, added)
    return added


def _run(writer: Writer, number: int, sessions: int) -> str:
    at = EPOCH + 100_000 * (number - 1)
    run = RunRecord(f"run_gallery{number}", "train", at, f"gallery {number}", {"seed": number})
    writer.add_sync(run)
    rng = random.Random(number)
    steps = 12
    for step in range(steps):
        done = step / steps
        values = {
            "reward/mean": 0.2 + 0.5 * done + 0.05 * rng.random(),
            "reward/std": 0.4 - 0.1 * done,
            "groups/collected": 8.0,
            "groups/zero_variance": float(rng.randrange(4)),
            "tokens/captured": 9000.0,
            "tokens/trained": 8000.0 - 100 * step,
            "staleness/mean": rng.random(),
            "staleness/max": float(rng.randrange(3)),
            "update/entropy": 1.2 - 0.5 * done,
            "importance/outside": 0.02 * rng.random(),
            "importance/effective": 0.9 + 0.05 * rng.random(),
            "kl/engine": 0.001 + 0.001 * rng.random(),
            "kl/sampler": 0.01 + 0.01 * rng.random(),
            "update/logprob_gap": 0.002 + 0.0005 * rng.random(),
            "update/grad_norm": 0.5 + rng.random(),
            "seconds/collect": 20 + 4 * rng.random(),
            "seconds/prepare": 0.4,
            "seconds/score": 2 + rng.random(),
            "seconds/update": 6 + rng.random(),
            "seconds/publish": 0.6,
        }
        writer.record_metrics(run.id, step, values)
        writer.add_sync(
            PolicyRecord(run.id, step + 1, at + 600 * step, verified=True, logprob_gap=0.0004)
        )
    return run.id


def _session(
    writer: Writer, run: str, number: int, sessions: int, turns: int, vocabulary: str | None
) -> str:
    rng = random.Random(number)
    group, half = number // GROUP, max(1, sessions // 2)
    second = number >= half
    at = EPOCH + (100_000 if second else 0) + 20.0 * (number % half)
    task = TaskRecord(f"task-{group % 12}", "gallery", "train", {"prompt": "…"}, at)
    record = SessionRecord(
        id=new_id("session"),
        created_at=at,
        run_id=run,
        task_suite=task.suite,
        task_split=task.split,
        task_id=task.id,
        group_id=f"{run}/{task.id}/{group}",
        harness=HARNESSES[group % len(HARNESSES)],
        name=f"gallery-{number}",
        vocabulary=vocabulary,
    )
    if number % GROUP == 0:
        writer.add_sync(task)
    version = 1 + int(11 * (number % half) / half)
    writer.add_sync(record)
    story = Story(writer, record, corpus(), version, rng)
    story.play(turns)
    if number % 7 != 6:
        reward = float(rng.random() < 0.3 + 0.05 * version) if group % 4 else float(group % 8 == 0)
        detail = {
            "passed": int(10 * reward),
            "failed": 10 - int(10 * reward),
            "log": "ran 10 tests",
        }
        given = Reward(
            record.id, "tests", reward, at + 60, source=RewardSource.VERIFIER, detail=detail
        )
        writer.add_sync(given)
    if number != sessions - 1:  # the newest is still running
        outcome = "timeout" if number % 11 == 10 else "completed"
        writer.update_session_sync(record.id, sealed_at=at + 70, outcome=outcome)
    return record.id


@dataclass
class Story:
    """The calls of one session, recorded one by one."""

    writer: Writer
    session: SessionRecord
    corpus: Corpus
    version: int
    rng: random.Random
    clock: float = 0.0
    tree: TokenTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = TokenTree(self.session.id)
        self.clock = self.session.created_at
        self._at = self.rng.randrange(len(self.corpus.prose))
        self._ids: dict[str, list[int]] = {}
        """The token ids of each call's prompt and reply, by call id."""

    def play(self, turns: int) -> None:
        """Record a coding agent's session of ``turns`` turns.

        Some sessions break once, in the middle; every fifth turn asks a sub-agent.
        """
        asked = (
            Message("system", f"You are a coding agent. {self.prose(300)}"),
            Message("user", f"Mend the module {self.session.task_id}: {self.prose(160)}"),
        )
        self.call((Message("user", f"A title for: {self.prose(60)}"),), "A title", side=True)
        last = self.call(asked, self.prose(120), tool="run_shell_command")
        for turn in range(1, turns):
            answer = Message("tool", self.prose(240), tool_call_id=f"tc_{last}")
            reason = None
            if turn == turns // 2 and self.rng.random() < 0.4:
                reason = self.rng.choice(
                    [BreakReason.REASONING_DROPPED, BreakReason.EDITED, BreakReason.COMPACTED]
                )
            final = turn == turns - 1
            reply, tool = self.prose(160), None if final else "run_shell_command"
            last = self.call((answer,), reply, parent=last, tool=tool, broke=reason)
            if turn % 5 == 2:
                sub = (Message("system", "You search code."), Message("user", self.prose(80)))
                self.call(sub, self.prose(60), kind=CallKind.SUBAGENT, role="search")
            if self.rng.random() < 0.04:
                self.call((answer,), "", parent=last, status=CallStatus.FAILED)

    def prose(self, characters: int) -> str:
        """Return the next characters of the documentation."""
        text = self.corpus.prose
        found = text[self._at : self._at + characters]
        self._at = (self._at + characters) % (len(text) - characters)
        return found

    def call(
        self,
        tail: Sequence[Message],
        reply: str,
        *,
        parent: str | None = None,
        tool: str | None = None,
        kind: CallKind = CallKind.MAIN,
        role: str | None = None,
        side: bool = False,
        broke: BreakReason | None = None,
        status: CallStatus = CallStatus.COMPLETE,
        finish: str | None = None,
        temperature: float = 1.0,
        ids: bool = True,
        open_: bool = False,
        reason: str | None = "the engine refused the connection",
    ) -> str:
        call_id, started = new_id("call"), self.clock
        wait, length = 0.1 + self.rng.random(), _TURN_S * (0.4 + self.rng.random())
        self.clock += length + 0.3
        request = {"model": "policy", "messages": [m.to_chat() for m in tail], "stream": True}
        begun = CallBegun(
            id=call_id,
            session_id=self.session.id,
            dialect="chat",
            started_at=started,
            request_body=json.dumps(request).encode(),
            stream=True,
            model_requested="policy",
            parent_call_id=parent,
            lineage_rule=None if parent is None else "minted_id",
            conversation=_conversation(tail, parent),
        )
        self.writer.begin_call(begun)
        if open_:
            self.writer.update_session_sync(self.session.id, outcome=None)
            return call_id
        failed = status is CallStatus.FAILED
        ended: dict[str, Any] = {
            "id": call_id,
            "session_id": self.session.id,
            "status": status,
            "ended_at": started + length,
            "kind": CallKind.SIDE if side else kind,
            "role": "title" if side else role,
            "model_served": "policy",
            "sampling": {"temperature": temperature, "top_p": 1.0, "max_tokens": 512},
            "sampler": Sampler("processed", temperature=temperature),
        }
        if failed:
            error = {"status": 502, "message": reason}
            self.writer.end_call_sync(CallEnded(**ended, reason=reason, error=error))
            return call_id
        called = () if tool is None else (self._tool(call_id, tool),)
        thinking = self.prose(80) if tool else None
        said = Message("assistant", reply, reasoning=thinking, tool_calls=called)
        ended |= {
            "first_token_at": started + wait,
            "replies": (said,),
            "response_body": json.dumps(said.to_chat()).encode(),
            "break_reason": broke,
            "notes": (Note("field_dropped", "store"),) if side else (),
        }
        self.writer.end_call_sync(
            CallEnded(**ended, **self._tokens(ended, tail, parent, ids, finish))
        )
        return call_id

    def _tool(self, call_id: str, name: str) -> ToolCall:
        arguments = {"command": f"grep -rn '{self.prose(24)}' src | head"}
        return ToolCall(f"tc_{call_id}", name, json.dumps(arguments))

    def _tokens(
        self,
        ended: Mapping[str, Any],
        tail: Sequence[Message],
        parent: str | None,
        ids: bool,
        finish: str | None,
    ) -> dict[str, Any]:
        said: Message = ended["replies"][0]
        wrote = f"{said.reasoning or ''}{said.content}{said.tool_calls or ''}"
        sampled = self.corpus.encode(wrote)
        history = list(self._ids.get(parent or "", []))
        if ended["break_reason"] is not None and len(history) > 60:
            del history[-50:-40]
        new = self.corpus.encode("".join(str(message.content) for message in tail)).tolist()
        prompt = np.asarray(history + new, dtype=np.uint32)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
        if not ids:
            return {"usage": usage}
        self._ids[ended["id"]] = [*prompt.tolist(), *sampled.tolist()]
        logprobs = [-math.exp(self.rng.gauss(-3.0, 2.0)) for _ in sampled]
        finish = finish or ("tool_calls" if said.tool_calls else "stop")
        choice = Choice(
            sampled,
            np.asarray(logprobs, dtype=np.float32),
            (VersionRun(0, self.version),),
            finish,
        )
        return {
            "usage": usage,
            "prompt_token_ids": prompt,
            "choices": (choice,),
            "growth": self.tree.grow(ended["id"], prompt, (choice,)),
        }


def _conversation(tail: Sequence[Message], parent: str | None) -> Conversation:
    digests = RequestDigests(
        system=b"", system_form=b"", tools=b"", ask=b"", units=(), forms=(), depth=len(tail)
    )
    tools = {"type": "function", "function": {"name": "run_shell_command", "parameters": {}}}
    return Conversation(
        tuple(tail), (tools,), len(tail), lineage=LineageState(digests, base_call_id=parent)
    )


def stories(store: str, *records: RunRecord) -> Iterator[Callable[..., Story]]:
    """Yield ``story(**fields of its SessionRecord)``, which begins a session in a new store."""
    migrate(store)
    with Writer(store) as writer:
        writer.add_sync(*records)
        number = 0

        def begin(version: int = 1, **fields: Any) -> Story:
            nonlocal number
            number += 1
            record = SessionRecord(new_id("session"), EPOCH + 60.0 * number, **fields)
            writer.add_sync(record)
            return Story(writer, record, corpus(), version, random.Random(number))

        yield begin
