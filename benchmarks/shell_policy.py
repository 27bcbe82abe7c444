"""A scripted policy that works in any harness's own shell, and a template that tempts to break.

Every turn the policy thinks, then asks for two shell commands at once. After the last turn it
repeats the output of the last command. It decides from the request alone, so that any number of
harnesses can ask it at the same time.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers import Delivery, RegexAnswer, Scores
from bridle.harnesses.verifiers.delivery import scores_in, whole_scores
from bridle.harnesses.verifiers.function import with_local_workspace
from bridle.recipes.reproduce.editing import text_of, tool_names

PARALLEL: Final = 2
"""Number of commands per turn."""

SHELLS: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = {
    "exec_command": lambda command: {"cmd": command},
    "Bash": lambda command: {"command": command, "description": "Runs a command"},
    "run_shell_command": lambda command: {
        "is_background": False,
        "description": "Runs a command",
        # Qwen Code may report no output of a command that ends at once.
        "command": f"{command}; code=$?; sleep 0.3; exit $code",
    },
    "bash": lambda command: {"description": "Runs a command", "command": command},
    "shell": lambda command: {"command": command},
}
"""The shell tools of the known harnesses, and the arguments of each for a command."""

SUBMIT: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The text that mini-swe-agent must print to end its run."""


@dataclass(frozen=True, slots=True)
class ShellPolicy:
    """A policy that replies ``turns`` times with two commands, and then with a line.

    The line is the last one that the commands printed.
    """

    turns: int

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        shell = next((name for name in SHELLS if name in tool_names(request)), None)
        if shell is None:
            return ScriptedReply("A side remark.", reasoning="This asks for no work.")
        outputs = [text_of(message) for message in request.messages if message["role"] == "tool"]
        turn = len(outputs) // PARALLEL
        if turn < self.turns:
            return _asking(shell, turn + 1, _commands(turn + 1))
        answer = f"The last line is {self.turns}b."
        last = next((text for text in outputs[::-1] if _says(text, f"{self.turns}b")), None)
        if last is None and turn < self.turns + 3:
            # On a busy machine a harness may report no output of a short command; look again.
            return _asking(shell, turn + 1, ("tail -n 1 a.txt", "tail -n 1 b.txt"))
        if last is None:
            answer = "The commands said nothing."
        if any(SUBMIT in text_of(message) for message in request.messages):
            command = f"echo {SUBMIT} && echo '{answer}'"
            return ScriptedReply(reasoning="All is done.", tool_calls=(_call(shell, command),))
        return ScriptedReply(answer, reasoning="All is done.")

    def task(self, identifier: str) -> Task:
        """Return the task for a harness; its ``payload`` holds the number of turns to verify."""
        return Task(
            id=identifier,
            suite="shell",
            prompt="Work through the numbered steps, then say what the last line is.",
            payload={"turns": self.turns},
        )


class WorkedThrough:
    """A verifier that gives 1.0 for work that was done in full.

    Every command must have run once, in order, and the answer must repeat the output of the last
    one.
    """

    async def __call__(self, delivery: Delivery) -> Scores:
        turns = delivery.task.payload["turns"]
        delivery = await with_local_workspace(delivery)
        written = [_lines(delivery.workspace / f"{name}.txt") for name in "ab"]
        wanted = [[f"{turn}{name}" for turn in range(1, turns + 1)] for name in "ab"]
        verdict = await RegexAnswer(rf"\b{turns}b\b")(delivery)
        said = whole_scores(scores_in(verdict))
        return {"reward": float(written == wanted and said["reward"] == 1.0)}


def train_bench_tokenizer(directory: Path, template: str | None = None) -> None:
    """Train a BPE tokenizer of English text with ``template``, without model weights.

    The default template is :data:`STRIPPING_TEMPLATE`.
    """
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    train_tokenizer(
        directory,
        list(pydoc_data.topics.topics.values()),
        vocab_size=4096,
        template=template or STRIPPING_TEMPLATE,
    )


def _asking(shell: str, turn: int, commands: tuple[str, ...]) -> ScriptedReply:
    # Every other turn also speaks, which some harnesses drop beside tool calls.
    return ScriptedReply(
        f"Step {turn}." if turn % 2 else "",
        reasoning=f"Step {turn}: both files get their line,\n  then I look at them.",
        tool_calls=tuple(_call(shell, command) for command in commands),
    )


def _commands(turn: int) -> tuple[str, ...]:
    return tuple(
        f"echo {turn}{name} >> {name}.txt && tail -n 1 {name}.txt" for name in "ab"[:PARALLEL]
    )


def _call(shell: str, command: str) -> ScriptedCall:
    # Compact, as no template and no JSON library of a harness writes it by default.
    return ScriptedCall(shell, json.dumps(SHELLS[shell](command), separators=(",", ":")))


def _says(text: str, line: str) -> bool:
    return re.search(rf"\b{line}\b", text) is not None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.exists() else []


STRIPPING_TEMPLATE: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nSignatures:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
{%- if message.role == 'assistant' %}
{%- set text = (message.content or '') | trim %}
{{- '<|im_start|>assistant\\n' + text }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or text %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- set opens = loop.first or messages[loop.index0 - 1].role != 'tool' %}
{%- if opens %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A ChatML template that drops the reasoning of every turn in the history and writes arguments its
own way."""
