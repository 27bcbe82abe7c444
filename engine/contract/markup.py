"""Markups of tool calls and reasoning, and their detection from a model's chat template.

Fine-tunes keep a family's name and change its template, so names are not used. The template renders
a reply with tool calls and reasoning. If the reply does not show them, the prompt with tools is
searched (some templates only instruct the model), then the template's source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bridle.engine.contract.errors import TemplateError

if TYPE_CHECKING:
    from bridle.engine.contract.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolMarkup:
    """One way to write tool calls."""

    name: str
    signs: tuple[re.Pattern[str], ...]
    """Patterns that match, one after the other, in a reply with calls, and in the source of a
    template that writes such replies."""
    opening: str
    """The text that begins a call and hardly occurs elsewhere; empty if there is no such text."""
    delimiters: tuple[str, ...]
    """All texts that may be special tokens; a reader needs to see them in the text."""

    def is_in(self, text: str) -> bool:
        """Return whether all signs stand in ``text`` in their order.

        Each is searched for after the first match of the one before it, so that the cost is linear
        in the text's length.
        """
        at = 0
        for sign in self.signs:
            found = sign.search(text, at)
            if found is None:
                return False
            at = found.end()
        return True


@dataclass(frozen=True, slots=True)
class ReasoningMarkup:
    """One way to set reasoning apart from the answer."""

    name: str
    opening: str
    closing: str


_TOOL: Final = "look_up_7"
_QUESTION: Final = "question-7"
_VALUE: Final = "value-7"
_THOUGHT: Final = "thought-7"
_GAP: Final = r"(?:\s|\\n)*"
"""White space in a rendering, or the escapes that stand for it in a source."""
_DEEPSEEK: Final = (
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_CALL_KEYS: Final = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _tools(name: str, opening: str, *signs: str, delimiters: Sequence[str] = ()) -> ToolMarkup:
    compiled = tuple(re.compile(sign) for sign in signs or (re.escape(opening),))
    shown = (opening, *delimiters) if opening else tuple(delimiters)
    return ToolMarkup(name, compiled, opening, shown)


TOOL_MARKUP: Final = (
    _tools("harmony", "<|channel|>commentary"),
    _tools("deepseek_v41", "<｜DSML｜ calls>"),
    _tools("deepseek_v4", "<｜DSML｜tool_calls>", delimiters=("｜DSML｜",)),
    _tools("deepseek_v32", "<｜DSML｜function_calls>", delimiters=("｜DSML｜",)),
    _tools(
        "deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json", delimiters=_DEEPSEEK
    ),
    _tools("deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", delimiters=_DEEPSEEK),
    _tools("step3", "<｜tool_calls_begin｜>"),
    _tools("mistral", "[TOOL_CALLS]", delimiters=("[ARGS]", "[CALL_ID]")),
    _tools("kimi_k2", "<|tool_calls_section_begin|>"),
    _tools("kimi_k3", "<|open|>tools<|sep|>"),
    _tools("k2_horizon", "<ifm|tool_calls>"),
    _tools("gemma4", "<|tool_call>", delimiters=("<tool_call|>", '<|"|>')),
    _tools("functiongemma", "<start_function_call>"),
    _tools("lfm2", "<|tool_call_start|>", delimiters=("<|tool_call_end|>",)),
    _tools("apertus", "<|tools_prefix|>"),
    _tools("cohere", "<|START_ACTION|>"),
    _tools("inkling", "<|content_invoke_tool_json|>"),
    _tools("internlm", "<|action_start|><|plugin|>"),
    _tools("plamo3", "<|plamo:begin_tool_requests:plamo|>"),
    _tools("muse_glimmer", "<atem:function_calls>"),
    _tools("minimax_m3", "]<]minimax[>[<tool_call>"),
    _tools("minimax_m2", "<minimax:tool_call>"),
    _tools("longcat", "<longcat_tool_call>"),
    _tools("dots", "<dots_function_call>"),
    _tools("llama4_pythonic", "<|python_start|>"),
    _tools("gigachat3", "function call<|role_sep|>"),
    _tools("nemotron_v2", "<TOOLCALL>"),
    _tools("granite", "<|tool_call|>"),
    _tools("olmo3", "<function_calls>"),
    _tools("granite_20b", "<function_call>"),
    _tools("phi4_mini", "functools["),
    _tools("minicpm5", '<function name="'),
    _tools("seed_oss", "<seed:tool_call>", delimiters=("</seed:tool_call>",)),
    _tools("hy_v3", "", "<tool_sep"),
    _tools("hy_v4", "", "<tool_calls", ">", "<arg_key"),
    _tools("hunyuan_a13b", "<tool_calls>", rf"<tool_calls>{_GAP}\["),
    _tools("poolside", "<tool_call>", "<assistant>", "<arg_key>", delimiters=_CALL_KEYS),
    _tools("glm", "<tool_call>", "<arg_key>", delimiters=_CALL_KEYS),
    _tools(
        "qwen_xml", "<tool_call>", rf"<tool_call>{_GAP}<function=", delimiters=("</tool_call>",)
    ),
    _tools("functionary", "<function=", r"<function=[^<>\s]+>\{"),
    _tools("granite_array", "<tool_call>", rf"<tool_call>{_GAP}\["),
    _tools("hermes", "<tool_call>", delimiters=("</tool_call>",)),
    _tools("llama_json", "<|python_tag|>", rf'<\|python_tag\|>|"name": "{_TOOL}", "parameters":'),
    _tools("pythonic", "", rf"\[{_TOOL}\("),
    _tools("xlam", "", rf'\[\{{"name": "{_TOOL}", "arguments":'),
)
"""Markups of tool calls in the order in which they are looked for: the more specific ones first."""

REASONING_MARKUP: Final = (
    ReasoningMarkup("harmony", "<|channel|>analysis<|message|>", "<|end|>"),
    ReasoningMarkup("gemma4", "<|channel>thought\n", "<channel|>"),
    ReasoningMarkup("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningMarkup("minimax_m3", "<mm:think>", "</mm:think>"),
    ReasoningMarkup("k2_horizon", "<ifm|think>", "</ifm|think>"),
    ReasoningMarkup("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ReasoningMarkup("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarkup("inkling", "<|content_thinking|>", "<|end_message|>"),
    ReasoningMarkup("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ReasoningMarkup("muse_glimmer", "to=self<|message|>", "<|eom|>"),
    ReasoningMarkup("mistral", "[THINK]", "[/THINK]"),
    ReasoningMarkup("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningMarkup("hy", "<think:opensource>", "</think:opensource>"),
    ReasoningMarkup("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningMarkup("think", "<think>", "</think>"),
)
THINK: Final = REASONING_MARKUP[-1]


def tool_markup(tokenizer: Tokenizer) -> ToolMarkup | None:
    """Return the markup in which the model's template writes tool calls.

    Return ``None`` if there is none or it is not known.
    """
    for text in _evidence(tokenizer):
        for markup in TOOL_MARKUP:
            if markup.is_in(text):
                return markup
    return None


def reasoning_markup(tokenizer: Tokenizer) -> ReasoningMarkup | None:
    """Return the markup with which the model's template sets reasoning apart.

    Return ``None`` if there is none or it is not known.

    Markup in a rendered reply or at the prompt's end takes precedence over markup in the source. A
    tag in the source that is not a token of the model counts only if it is ``<think>``, which
    models write as plain text.
    """
    try:
        source = tokenizer.chat_template_source
    except TemplateError:
        return None
    reply = _reply(tokenizer)
    shown = (reply if _THOUGHT in reply else "") + prompt_end(tokenizer)
    for markup in REASONING_MARKUP:
        if markup.opening.strip() in shown:
            return markup
    for markup in REASONING_MARKUP:
        if markup.opening.strip() in source and (markup == THINK or _is_token(markup, tokenizer)):
            return markup
    return None


def _is_token(markup: ReasoningMarkup, tokenizer: Tokenizer) -> bool:
    """Return whether the opening is no special token, or is one that the model has."""
    tag = re.match(r"<[^>]*>|\[[^\]]*\]", markup.opening)
    return tag is None or tokenizer.token_id(tag.group()) is not None


def prompt_end(tokenizer: Tokenizer) -> str:
    """Return the text that the template writes between a question and the reply.

    It is empty if the template refuses.
    """
    try:
        prompt = tokenizer.render(_ASKED)
    except TemplateError:
        return ""
    return prompt.rpartition(_QUESTION)[2]


def end_of_turn(tokenizer: Tokenizer, *, called: bool) -> int | None:
    """Return the id with which the template ends a reply.

    Return ``None`` if it ends none with an id that ends replies. The id may be another one after
    tool calls (``called``). A template may leave the end out until another turn follows.
    """
    said = _CALL if called else {"role": "assistant", "content": _VALUE}
    follows = {"role": "tool", "content": "a", "tool_call_id": "abcdefgh1"} if called else _ASKED[0]
    for messages in ((*_ASKED, said), (*_ASKED, said, follows)):
        try:
            text = tokenizer.render(
                messages, _TOOLS if called else None, add_generation_prompt=False
            )
        except TemplateError:
            continue
        ids = tokenizer.encode(text.rpartition(_VALUE)[2]) if _VALUE in text else ()
        for token_id in ids:
            if token_id in tokenizer.eos_token_ids:
                return token_id
    return end_of_turn(tokenizer, called=False) if called else None


def unread_calls(content: str) -> str | None:
    """Return the name of the markup in which ``content`` opens a call, or ``None``.

    No parser took calls from ``content``.
    """
    opened = [each for each in TOOL_MARKUP if each.opening and each.opening in content]
    matching = (each for each in opened if each.is_in(content))
    found = next(matching, opened[-1] if opened else None)
    return None if found is None else found.name


_ASKED: Final = ({"role": "user", "content": _QUESTION},)
_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    },
)
_CALL: Final[Mapping[str, Any]] = {
    "role": "assistant",
    "content": "",
    "reasoning": _THOUGHT,
    "tool_calls": [
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"name": _TOOL, "arguments": json.dumps({"key": _VALUE})},
        }
    ],
}


def _evidence(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts that show how the model writes calls, the best one first."""
    reply = _reply(tokenizer)
    if _TOOL in reply:
        yield reply
        return
    try:
        prompt = tokenizer.render(_ASKED, _TOOLS)
    except TemplateError:
        prompt = ""
    if _TOOL in prompt:
        yield prompt
    try:
        yield tokenizer.tools_template_source
    except TemplateError:
        return


def _reply(tokenizer: Tokenizer) -> str:
    """Return a reply that reasons and calls a tool, as the template has it after the question."""
    try:
        text = tokenizer.render((*_ASKED, _CALL), _TOOLS, add_generation_prompt=False)
    except TemplateError:
        return ""
    return text.rpartition(_QUESTION)[2]
