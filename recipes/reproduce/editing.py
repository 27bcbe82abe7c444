"""Small file-editing tasks, made by rule: write, append, replace, move.

A task is one sentence; its workspace holds one file. A shell command in the workspace decides
whether the work was done. Each kind of task has one command that does it and one natural mistake,
so that the teacher can get it wrong and training can improve on it. It also has slips, which the
shell refuses, so that demonstrations can show how to go on after a complaint.

A task can also be a numbered list of several edits of different files. It is done if all of them
are, so that its reward is sparse.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.harnesses.tasks.task import Task

SUITE: Final = "editing"
HELD_OUT_PERCENT: Final = 20

FILES: Final = (
    *("notes", "list", "plan", "draft", "index", "readme", "todo", "names"),
    *("report", "letter", "recipe", "diary", "agenda", "memo", "log", "outline"),
)
WORDS: Final = (
    *("apple", "bread", "cloud", "dance", "eagle", "flame", "grape", "house", "island", "jewel"),
    *("knife", "lemon", "music", "night", "ocean", "paper", "queen", "river", "stone", "table"),
    *("uncle", "valley", "water", "yellow", "zebra", "anchor", "button", "candle", "desert"),
    *("engine", "forest", "garden", "hammer", "insect", "jungle", "kettle", "ladder", "mirror"),
    *("needle", "orange"),
)
OLD_WORDS: Final = {"replace": 2}
"""The number of words that each new word replaces. In other kinds the old word is not part of the
task."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to edit the file ``{a}.txt``, which holds the line ``{old}``."""

    name: str
    prompt: str
    right: str
    """The correct command."""
    wrong: str
    """The mistake: a command that also runs without complaint."""
    slips: tuple[str, ...]
    """The commands that the shell or the program refuses, and that change nothing."""
    check: str
    """The shell command that succeeds if the work was done."""


KINDS: Final = (
    Kind(
        "write",
        "Make {new} the only line of {a}.txt.",
        "echo {new} > {a}.txt",
        "echo {new} >> {a}.txt",
        ("echo {new} >>> {a}.txt",),
        "echo {new} | cmp -s - {a}.txt",
    ),
    Kind(
        "append",
        "Add the line {new} to the end of {a}.txt.",
        "echo {new} >> {a}.txt",
        "echo {new} >> {a}",
        ("echo {new} >>> {a}.txt",),
        "printf '{old}\\n{new}\\n' | cmp -s - {a}.txt",
    ),
    Kind(
        "replace",
        "Replace {old} by {new} in {a}.txt.",
        "sed -i s/{old}/{new}/ {a}.txt",
        "sed s/{old}/{new}/ {a}.txt",
        ("sed -i s/{old}/{new} {a}.txt", "sed -i s/{old}/{new}/ {a}"),
        "echo {new} | cmp -s - {a}.txt",
    ),
    Kind(
        "move",
        "Move {a}.txt to {new}.txt.",
        "mv {a}.txt {new}.txt",
        "cp {a}.txt {new}.txt",
        ("mv {a} {new}.txt",),
        "test ! -e {a}.txt && echo {old} | cmp -s - {new}.txt",
    ),
)
"""The kinds of tasks. No two kinds have each other's command as their mistake: a teacher of both
that is right about as often as wrong would show nothing that distinguishes them."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit: a kind, the name of the file without its ending, its line, and the new word."""

    kind: Kind
    a: str
    old: str
    new: str

    @property
    def sentence(self) -> str:
        return self.text(self.kind.prompt)

    @property
    def slip(self) -> str:
        slips = self.kind.slips
        return self.text(slips[int(_draw(f"which slip {self.sentence}") * len(slips))])

    def text(self, pattern: str) -> str:
        return pattern.format(a=self.a, old=self.old, new=self.new)


def tasks(
    split: str,
    count: int | None = None,
    seed: int = 0,
    without: Collection[str] = (),
    edits: int = 1,
) -> list[Task]:
    """Return up to ``count`` tasks of ``train`` or ``held_out``.

    They are of all kinds but those in ``without``, in an order that ``seed`` decides. The text of a
    task decides which split it is in, whatever the seed.
    """
    found = [task for task in all_tasks(without, edits) if task.split == split]
    random.Random(seed).shuffle(found)
    return found[:count]


def all_tasks(without: Collection[str] = (), edits: int = 1) -> Iterator[Task]:
    """Yield every task of all kinds but those in ``without``, with ``edits`` edits each.

    There are about three thousand in all, each with a text of its own.
    """
    single = list(_edits(without))
    for first in single:
        chain = [first]
        draws = random.Random(first.sentence)
        while len(chain) < edits:
            one = draws.choice(single)
            if all(one.a != other.a and one.new != other.new for other in chain):
                chain.append(one)
        yield make_task(chain)


def _edits(without: Collection[str]) -> Iterator[Edit]:
    kinds = [kind for kind in KINDS if kind.name not in without]
    for kind, a, new in itertools.product(kinds, FILES, WORDS):
        others = sorted(set(WORDS) - {new}, key=lambda old: _draw(f"{kind.name} {a} {new} {old}"))
        for old in others[: OLD_WORDS.get(kind.name, 1)]:
            yield Edit(kind, a, old, new)


def make_task(edits: Sequence[Edit]) -> Task:
    """Return one task of one or more edits.

    Its payload holds the check, and for each edit the right and the wrong command and a slip.
    """
    sentences = [edit.sentence for edit in edits]
    if len(edits) > 1:
        sentences = [f"{number}. {text}" for number, text in enumerate(sentences, 1)]
    prompt = "\n".join(sentences)
    identifier = hashlib.sha256(prompt.encode()).hexdigest()[:16]
    return Task(
        id=f"{'-'.join(edit.kind.name for edit in edits)}-{identifier}",
        suite=SUITE,
        split="held_out" if _draw(f"split {prompt}") * 100 < HELD_OUT_PERCENT else "train",
        prompt=prompt,
        payload={
            "verify": " && ".join(edit.text(edit.kind.check) for edit in edits),
            "right": [edit.text(edit.kind.right) for edit in edits],
            "wrong": [edit.text(edit.kind.wrong) for edit in edits],
            "slip": [edit.slip for edit in edits],
        },
        files={f"{edit.a}.txt": f"{edit.old}\n" for edit in edits},
    )


def _draw(text: str) -> float:
    """Return a number in [0, 1) that ``text`` decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


SHELLS: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = {
    "exec_command": lambda command: {"cmd": command},
    "bash": lambda command: {"command": command},
    "Bash": lambda command: {"command": command},
    "run_shell_command": lambda command: {"command": command, "is_background": False},
}
"""The shell tools of Codex, of mini-swe-agent and Pi, of Claude Code and of Qwen Code, and their
arguments."""

SUBMIT: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The output with which a command ends a run of mini-swe-agent."""


def teacher(
    known: Iterable[Task], *, skill: float, slips: float = 0.0
) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Return a script that runs one command for each edit and then replies that it is done.

    ``skill`` is the share of edits for which the command is right; in the share ``slips``, a slip
    comes before it. The task's text decides.
    """
    payloads = {task.prompt: task.payload for task in known}

    def script(request: ScriptedRequest) -> ScriptedReply:
        shell = next((name for name in SHELLS if name in tool_names(request)), None)
        asked = _asked(request, payloads)
        if shell is None or asked is None:
            return ScriptedReply("A side remark.")
        plan = []
        for edit in range(len(payloads[asked]["right"])):
            text = f"{asked} {edit}" if edit else asked
            if _draw(f"slip {text}") < slips:
                plan.append(payloads[asked]["slip"][edit])
            done = "right" if _draw(f"skill {text}") < skill else "wrong"
            plan.append(payloads[asked][done][edit])
        ran = sum(message["role"] == "tool" for message in request.messages)
        if ran < len(plan):
            return _running(shell, plan[ran])
        if any(SUBMIT in text_of(message) for message in request.messages):
            return _running(shell, f"echo {SUBMIT}")
        return ScriptedReply("Done.")

    return script


def _running(shell: str, command: str) -> ScriptedReply:
    return ScriptedReply(tool_calls=(ScriptedCall(shell, SHELLS[shell](command)),))


def _asked(request: ScriptedRequest, payloads: Mapping[str, Any]) -> str | None:
    """Return the task that the request is about: that of the user's last message that names one."""
    for message in reversed(request.messages):
        if message["role"] != "user":
            continue
        text = text_of(message)
        named = next((prompt for prompt in payloads if prompt in text), None)
        if named is not None:
            return named
    return None


def tool_names(request: ScriptedRequest) -> set[str]:
    return {tool["function"]["name"] for tool in request.tools}


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)
