"""A scripted policy whose work follows from a seed in its task, with the mishaps of real sessions.

A task names a seed and a number of turns. Each turn asks for one to three shell commands at once.
One turn asks for a file that is not there, and the next one makes it. The engine fails once in each
session, so that the harness asks again. All but this failure is decided by the request alone, so
that any number of harnesses can ask at the same time, and a re-entered session goes on as before.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from bridle.bench.shell_policy import SHELLS, SUBMIT
from bridle.engine.scripted import (
    Cut,
    Fault,
    Refuse,
    ScriptedCall,
    ScriptedReply,
    ScriptedRequest,
)
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Delivery, Scores
from bridle.harnesses.verifiers.function import with_local_workspace
from bridle.recipes.reproduce.editing import text_of, tool_names

_TASK: Final = re.compile(r"Take the (\d+) numbered steps of the (\w+) with the seed (\d+)")
_RUNNING: Final = re.compile(r"running with session ID (\d+)")
_SEVERAL: Final = (1, 1, 1, 2, 2, 3)
"""The numbers of commands that a turn draws from."""


class Kind(StrEnum):
    """The kind of a session: its work, and one thing that happens in it."""

    WORK = "work"
    """Commands in the foreground, one of which fails and is tried again; a request that fails."""
    CUT = "cut"
    """The same, with a reply that breaks off instead of the failed request."""
    LONG = "long"
    """A command of three seconds, which some harnesses let run on and ask for later."""
    BACKGROUND = "background"
    """A command that works in the background while others run."""
    SUBAGENTS = "sub-agents"
    """Two sub-agents at once (``delegating_policy``), re-entered before the first summary."""
    COMPACTION = "compaction"
    """The same, re-entered after the first summary."""


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command, and how it is to be run."""

    text: str
    long: bool = False
    background: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one session."""

    kind: Kind
    seed: int
    turns: int
    """Number of turns, with the last one, which answers."""

    @classmethod
    def drawn(cls, kind: Kind, seed: int, least: int = 5, most: int = 30) -> Work:
        """Return the work of a seed, of ``least`` to ``most`` turns."""
        return cls(kind, seed, random.Random(seed).randint(least, most))

    @classmethod
    def stated(cls, texts: Sequence[str]) -> Work | None:
        """Return the work that the texts of a conversation state, or ``None``."""
        found = next((match for text in texts if (match := _TASK.search(text))), None)
        return None if found is None else cls(Kind(found[2]), int(found[3]), int(found[1]))

    def task(self, identifier: str) -> Task:
        """Return the task for a harness. Its payload states the work for :class:`Done`."""
        prompt = (
            f"Take the {self.turns} numbered steps of the {self.kind} with the seed {self.seed}, "
            "then say that all is done."
        )
        payload = {"kind": str(self.kind), "seed": self.seed, "turns": self.turns}
        return Task(id=identifier, suite="seeded", prompt=prompt, payload=payload)

    def commands(self) -> list[tuple[Command, ...]]:
        """Return the commands of each turn but the last."""
        rng = random.Random(self.seed)
        asking = self.turns - 1
        missing, special = rng.randrange(asking - 1), rng.randrange(asking)
        return [self._turn(turn, missing, special, rng.choice(_SEVERAL)) for turn in range(asking)]

    def _turn(self, turn: int, missing: int, special: int, count: int) -> tuple[Command, ...]:
        if turn == missing:
            return (Command("cat found.txt"),)
        if turn == missing + 1:
            return (Command("echo found > found.txt && cat found.txt"),)
        made = [_line(f"{turn + 1}{name}", name) for name in "abc"[:count]]
        if turn == special and self.kind is Kind.LONG:
            made[0] = replace(made[0], text=f"sleep 3 && {made[0].text}", long=True)
        if turn == special and self.kind is Kind.BACKGROUND:
            made.append(Command("sleep 2 && echo over > over.txt", background=True))
        return tuple(made)

    @property
    def faulty(self) -> int:
        """The turn at which the engine fails once, from 0."""
        return random.Random(self.seed + 1).randrange(self.turns)


class SeededPolicy:
    """A policy that does the work which its task states."""

    def __init__(self) -> None:
        self._failed: set[Work] = set()

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        names = tool_names(request)
        shell = next((name for name in SHELLS if name in names), None)
        work = Work.stated([text_of(m) for m in request.messages if m["role"] == "user"])
        if shell is None or work is None:
            return ScriptedReply("A side remark.", reasoning="This asks for no work.")
        outputs = [text_of(m) for m in request.messages if m["role"] == "tool"]
        turn, running = _progress(work, outputs)
        fault = self._fault(work, turn)
        if fault is not None:
            return ScriptedReply("This breaks off after a few words.", fault=fault)
        if running is not None:
            asked = {"session_id": int(running), "chars": "", "yield_time_ms": 5000}
            call = ScriptedCall("write_stdin", asked)
            return ScriptedReply(reasoning="It still runs.", tool_calls=(call,))
        if turn < work.turns - 1:
            calls = tuple(_call(shell, command) for command in work.commands()[turn])
            said = f"Step {turn + 1}." if turn % 2 else ""
            return ScriptedReply(said, reasoning=f"Step {turn + 1} is due.", tool_calls=calls)
        if any(SUBMIT in text_of(message) for message in request.messages):
            over = Command(f"echo {SUBMIT} && echo 'All is done.'")
            return ScriptedReply(reasoning="All is done.", tool_calls=(_call(shell, over),))
        return ScriptedReply("All is done.", reasoning="No step is left.")

    def _fault(self, work: Work, turn: int) -> Fault | None:
        """Return the failure that is due at a turn, once per work."""
        if turn != work.faulty or work in self._failed or work.kind not in (Kind.WORK, Kind.CUT):
            return None
        self._failed.add(work)
        return Cut(after_tokens=4) if work.kind is Kind.CUT else Refuse(status=503)


class Done:
    """A verifier that gives 1.0 if each command of the work ran once, in order."""

    async def __call__(self, delivery: Delivery) -> Scores:
        payload = delivery.task.payload
        work = Work(Kind(payload["kind"]), payload["seed"], payload["turns"])
        delivery = await with_local_workspace(delivery)
        texts = [command.text for turn in work.commands() for command in turn]
        for name in "abc":
            wanted = [found[1] for text in texts if (found := re.search(rf"(\d+{name}) >>", text))]
            path = delivery.workspace / f"{name}.txt"
            if (path.read_text(encoding="utf-8").split() if path.exists() else []) != wanted:
                return {"reward": 0.0}
        return {"reward": float((delivery.workspace / "found.txt").exists())}


def _progress(work: Work, outputs: Sequence[str]) -> tuple[int, str | None]:
    """Return the number of turns that are over, and the id of a command that still runs."""
    place = 0
    for turn, commands in enumerate(work.commands()):
        if place + len(commands) > len(outputs):
            return turn, None
        printed = outputs[place : place + len(commands)]
        place += len(commands)
        while running := next((m[1] for text in printed if (m := _RUNNING.search(text))), None):
            if place == len(outputs):
                return turn, running
            printed = outputs[place : place + 1]
            place += 1
    return work.turns - 1, None


def _line(line: str, name: str) -> Command:
    return Command(f"echo {line} >> {name}.txt && tail -n 1 {name}.txt")


def _call(shell: str, command: Command) -> ScriptedCall:
    text = command.text
    own: dict[str, Any] = {}
    if shell == "exec_command" and (command.long or command.background):
        own = {"yield_time_ms": 500}
    elif command.background and shell == "Bash":
        own = {"run_in_background": True}
    elif command.background and shell == "run_shell_command":
        own = {"is_background": True}
    elif command.background:
        text = f"({text}) > over.log 2>&1 & echo begun"
    return ScriptedCall(shell, json.dumps({**SHELLS[shell](text), **own}, separators=(",", ":")))
