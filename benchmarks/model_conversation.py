"""The conversation in which a family is tested, and the model that is played in it.

The model renders messages as vLLM does, with the family's own template. For an exactly continued
prompt, it takes the given ids. A reply is sampled as the family writes one: its text comes from the
template, its arguments are formatted unlike any serialiser's, and it ends with the family's own
token. Every exact prompt is compared with the whole conversation rendered at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bridle.bench.families import Family
from bridle.bench.played_engine import Answer
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer

SYSTEM: Final = "SysRule: answer in one word."
TOOL: Final[dict[str, Any]] = {
    "name": "look_up",
    "description": "Find a word.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string"}, "page": {"type": "integer"}},
        "required": ["word", "page"],
    },
}


@dataclass(frozen=True, slots=True)
class Step:
    """One call: the new part of its request, and the model's reply."""

    user: str | None
    """The new user message, or ``None`` if the request brings the results of the previous calls."""
    text: str = ""
    calls: int = 0

    def words(self, at: int) -> list[str]:
        return [f"wörd{at}x{n}" for n in range(self.calls)]

    def says(self, at: int) -> str:
        return f"{self.text}{at}." if self.text else ""


WITH_TOOLS: Final = (
    Step("Qone, what is a café?", "Letmesee", 1),
    Step(None, "", 2),
    Step(None, "Ahouse"),
    Step("Qtwo  \n\nÇa va?", "", 1),
    Step(None, "Andmore", 1),
    Step(None, "Twohouses"),
    Step("Qthree?", "Yes"),
    Step("Qfour?", "No"),
)
WITHOUT_TOOLS: Final = tuple(
    Step(f"Q{name}, what is a café?", "Ahouse")
    for name in ("one", "two", "three", "four", "five", "six", "seven", "eight")
)


def steps_for(tools: bool, parallel: bool, *, bare: bool = True) -> tuple[Step, ...]:
    """Return the longest conversation that a template supports.

    With ``bare``, calls may come without text beside them.
    """
    if not tools:
        return WITHOUT_TOOLS
    return tuple(
        Step(step.user, step.text if bare else step.text or "Isee", min(step.calls, 1 + parallel))
        for step in WITH_TOOLS
    )


def thought(at: int) -> str:
    return f"PONDER{at} the page"


def odd_arguments(word: str, at: int) -> str:
    return f'{{"word":"{word}",  "page":{at}}}'


def result(word: str) -> str:
    """Return the tool's result, which does not contain the word."""
    return f"found{word[::-1]}: 12 cafés\n"


@dataclass(slots=True)
class PlayedModel:
    """A model that samples the scripted reply at each step of a family's conversation."""

    tokenizer: Tokenizer
    family: Family
    steps: tuple[Step, ...]
    thinks: bool = False
    differences: list[str] = field(default_factory=list)
    """The prompts that differ from the whole rendering in other parts than the sampled ones."""
    refusals: list[str] = field(default_factory=list)
    _last: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def call_id(self, at: int, n: int) -> str:
        match self.family.call_ids:
            case "nine":
                return f"aB{at:03d}c{n:03d}"
            case "counted":
                before = sum(step.calls for step in self.steps[:at])
                return f"functions.look_up:{before + n}"
            case _:
                return f"chatcmpl-tool-{at:015d}a{n:016d}"

    def message(self, at: int, *, reasoning: bool = True) -> dict[str, Any]:
        """Return the reply as the engine parses it."""
        step = self.steps[at]
        made: dict[str, Any] = {"role": "assistant", "content": step.says(at) or None}
        if self.thinks and reasoning:
            made["reasoning"] = thought(at)
        if step.calls:
            made["tool_calls"] = [
                {
                    "id": self.call_id(at, n),
                    "type": "function",
                    "function": {"name": TOOL["name"], "arguments": odd_arguments(word, at)},
                }
                for n, word in enumerate(step.words(at))
            ]
        return made

    def request(self, at: int) -> list[dict[str, Any]]:
        """Return the messages of a call's request, with replies exactly as the engine sent them."""
        messages: list[dict[str, Any]] = []
        for before in range(at + 1):
            step = self.steps[before]
            if step.user is not None:
                messages.append({"role": "user", "content": step.user})
            else:
                messages += [
                    {
                        "role": "tool",
                        "tool_call_id": self.call_id(before - 1, n),
                        "name": TOOL["name"],
                        "content": result(word),
                    }
                    for n, word in enumerate(self.steps[before - 1].words(before - 1))
                ]
            if before < at:
                messages.append(self.message(before))
        return messages

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        uses = any(step.calls for step in self.steps)
        return [{"type": "function", "function": TOOL}] if uses else None

    def render(self, messages: Sequence[Mapping[str, Any]], *, ends: bool = False) -> str:
        return self.tokenizer.render(messages, self.tools, add_generation_prompt=not ends)

    def sampled(self, at: int, prompt: str) -> list[int]:
        """Return the ids of the reply that follows a prompt with this text."""
        message, step = self.message(at), self.steps[at]
        shown = self._written(at, message)
        for word in step.words(at):
            plain = json.dumps({"word": word, "page": at}, ensure_ascii=False)
            shown = shown.replace(plain, odd_arguments(word, at))
        if self.thinks and thought(at) not in shown:
            opened = prompt.rstrip().endswith("<think>")
            shown = f"{'' if opened else '<think>' + chr(10)}{thought(at)}\n</think>\n\n{shown}"
        if any(word not in shown for word in step.words(at)):
            # The template shows no calls; the policy writes some all the same.
            shown += "".join(
                f'<tool_call>\n{{"name": "look_up", "arguments": {odd_arguments(word, at)}}}\n'
                "</tool_call>"
                for word in step.words(at)
            )
        end = self.family.call_end if step.calls else self.family.text_end
        end_id = self.tokenizer.token_id(end or self.family.eos[0])
        assert end_id is not None
        return [*self.tokenizer.encode(shown), end_id]

    def _written(self, at: int, message: Mapping[str, Any]) -> str:
        """Return the reply as the template writes it, without its end token."""
        history = self.request(at)
        try:
            whole = self.render([*history, message], ends=True)
            before = self.render(history)
        except TemplateError:
            return self.steps[at].says(at)
        start = next(
            (n for n, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b),
            min(len(whole), len(before)),
        )
        text = whole[start:]
        last = max((text.rfind(word) + len(word) for word in self._marks(at)), default=0)
        family = self.family
        ends = [*family.eos, family.call_end, family.text_end, family.earlier_end]
        found = [place for end in ends if end and (place := text.find(end, last)) >= 0]
        return text[: min(found)] if found else text.rstrip()

    def _marks(self, at: int) -> list[str]:
        step = self.steps[at]
        return [*step.words(at), *([step.says(at)] if step.text else [])]

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """Return the reply to a chat request.

        Raise :class:`TemplateError` if the template refuses its messages.
        """
        messages = body["messages"]
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        at = sum(message["role"] == "assistant" for message in messages)
        ids = self.tokenizer.encode(self.render(messages)) if given is None else given
        sampled = self.sampled(at, self.tokenizer.decode(ids[-40:]))
        if given is not None:
            objection = self._objection(at, self._native(messages), given)
            if objection:
                self.differences.append(f"call {at + 1}: {objection}")
        self._last = (ids, sampled)
        return Answer(ids, sampled, self.message(at))

    def _native(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the ids that the engine itself gave to its calls."""
        made, at, result_at = [], -1, 0
        for message in messages:
            copy = dict(message)
            if copy["role"] == "assistant":
                at, result_at = at + 1, 0
                if copy.get("tool_calls"):
                    copy["tool_calls"] = [
                        {**call, "id": self.call_id(at, n)}
                        for n, call in enumerate(copy["tool_calls"])
                    ]
            elif copy["role"] == "tool":
                copy["tool_call_id"] = self.call_id(at, result_at)
                result_at += 1
            made.append(copy)
        return made

    def _objection(
        self, at: int, messages: Sequence[Mapping[str, Any]], ids: list[int]
    ) -> str | None:
        """Return how an exact prompt differs from the whole rendering after the last reply.

        Return ``None`` if it does not.
        """
        before, sampled = self._last
        path = [*before, *sampled]
        if ids[: len(path)] != path:
            return "the recorded ids are not its beginning"
        try:
            text = self.render(messages)
        except TemplateError as error:
            return f"the template refuses the whole: {error}"
        last, says = self.steps[at - 1], self.steps[at - 1].says(at - 1)
        if last.calls and last.text and text.rfind(says) > text.rfind("found"):
            # The template moves the text behind the results, where it was not sampled.
            reply = max(n for n, one in enumerate(messages) if one["role"] == "assistant")
            moved = {**messages[reply], "content": None}
            text = self.render([*messages[:reply], moved, *messages[reply + 1 :]])
        truth_ids = self.tokenizer.encode(text)
        truth = self.tokenizer.decode(truth_ids)
        end = self.tokenizer.decode(path[-1:])
        new = ids[len(path) :]
        tail = self.tokenizer.decode(new)
        marks = [mark for mark in self._marks(at - 1) if mark in truth]
        shows_all = len(marks) == len(self._marks(at - 1))
        if shows_all:
            place = max(truth.rfind(mark) + len(mark) for mark in marks)
            after = truth[place:]
        else:
            after = truth
        if not after.endswith(tail):
            return f"{tail!r} is not at the end of the whole, {after[-len(tail) - 40 :]!r}"
        if truth_ids[-len(new) :] != new:
            return "other ids than at the end of the whole"
        rest = after[: len(after) - len(tail)]
        # Some templates end an earlier reply with another token than the policy sampled.
        bare = _without_special(self.tokenizer, rest)
        if bare == rest.rstrip():
            return f"{rest[-60:]!r} stands before the tail {tail!r} and not {end!r}"
        if shows_all:
            said = self.tokenizer.decode(sampled)
            place = max(said.rfind(mark) + len(mark) for mark in marks)
            ended = _without_special(self.tokenizer, said[place:])
            if "".join(ended.split()) != "".join(bare.split()):
                return f"{rest!r} follows the reply in the whole, and {said[place:]!r} here"
        return None


def _without_special(tokenizer: Tokenizer, text: str) -> str:
    """Return ``text`` without trailing space and without the special token, if any, at its end."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    ends = [token.content for token in added if text.rstrip().endswith(token.content)]
    return text.rstrip().removesuffix(max(ends, key=len)) if ends else text.rstrip()
