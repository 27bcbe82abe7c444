"""The grammar for each markup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from bridle.engine.contract.markup import THINK, ReasoningMarkup, reasoning_markup, tool_markup
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.markup import (
    deepseek,
    dsml,
    functionary,
    glm,
    hermes,
    llama,
    mistral,
    nemotron,
    qwen,
)
from bridle.engine.serve.markup.calls import Calls
from bridle.engine.serve.markup.reading import Feed, MarkupReader, Reading

Grammar = Callable[[Feed, Calls], Reading[None]]

READ: Final[Mapping[str, Grammar]] = {
    "hermes": hermes.read,
    "llama_json": llama.read,
    "mistral": mistral.read,
    "nemotron_v2": nemotron.read,
    "functionary": functionary.read,
    "deepseek_v3": deepseek.read,
    "deepseek_v31": deepseek.read,
    "deepseek_v32": partial(dsml.read, block="function_calls"),
    "deepseek_v4": partial(dsml.read, block="tool_calls"),
    "glm": glm.read,
    "poolside": glm.read,
    "qwen_xml": qwen.read,
    "seed_oss": partial(qwen.read, opening="<seed:tool_call>", closing="</seed:tool_call>"),
}
"""Grammars by the markup's name in ``engine/contract/markup.py``."""


@dataclass(frozen=True, slots=True)
class ReplyMarkup:
    """The markup of a model's replies."""

    tools: str | None
    """A key of :data:`READ`, or ``None`` if the template has no tool calls, or none that are
    read."""
    reasoning: ReasoningMarkup | None
    """The markup of reasoning, or ``None`` if reasoning stays in the content."""
    token_ids: frozenset[int]
    """Special tokens that belong to the markup. Readers need to see them in the text, and calls
    that no reader takes out must not lose them."""


def reply_markup(tokenizer: Tokenizer, *, parse_thinking: bool) -> ReplyMarkup:
    """Return the markup of replies in the model's template."""
    tools = tool_markup(tokenizer)
    reasoning = (reasoning_markup(tokenizer) or THINK) if parse_thinking else None
    delimiters = [*(tools.delimiters if tools else ())]
    delimiters += [reasoning.opening.strip(), reasoning.closing] if reasoning else []
    ids = (tokenizer.token_id(delimiter) for delimiter in delimiters)
    return ReplyMarkup(
        tools.name if tools and tools.name in READ else None,
        reasoning,
        frozenset(token_id for token_id in ids if token_id is not None),
    )


def reader(markup: str, tools: Sequence[Mapping[str, Any]] = ()) -> MarkupReader:
    """Return a reader of one reply in ``markup``, a key of :data:`READ`.

    ``tools`` are the request's.
    """
    calls = Calls(tools)
    return MarkupReader(lambda feed: READ[markup](feed, calls))
