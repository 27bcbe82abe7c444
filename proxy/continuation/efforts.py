"""Reasoning efforts that a chat template takes.

Templates raise on names of efforts that they do not know, and no two families know the same ones:
Qwen3.8 has no ``high``, Harmony no ``xhigh``. A request with a refused one gets the nearest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from msgspec import structs

from bridle.engine.contract.errors import TemplateError
from bridle.proxy.wire.canonical import Request
from bridle.store.records import Note

if TYPE_CHECKING:
    from bridle.engine.contract.tokenizer import Tokenizer

LEVELS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts that providers know, from the least on."""
EFFORT_CHANGED: Final = "reasoning_effort_changed"
"""Name of the note on a call whose effort is another one for the template."""


def refused_efforts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the efforts that the template of ``tokenizer`` raises on, the least first.

    The template must render a plain conversation.
    """
    return tuple(level for level in LEVELS if not _renders(tokenizer, level))


def _renders(tokenizer: Tokenizer, effort: str) -> bool:
    asked = Request(dialect="", model="", extra={"reasoning_effort": effort})
    try:
        tokenizer.render([{"role": "user", "content": "Go on."}], **asked.template_arguments or {})
    except TemplateError:
        return False
    return True


def with_taken_effort(
    refused: Collection[str], request: Request
) -> tuple[Request, tuple[Note, ...]]:
    """Return ``request`` with an effort that the template takes, and a note if it is another one.

    Of two that are equally near, it is the greater one. A refused ``none`` only disables thinking.
    """
    effort = request.extra.get("reasoning_effort")
    if effort not in refused:
        return request, ()
    extra = {name: value for name, value in request.extra.items() if name != "reasoning_effort"}
    arguments, place = request.template_kwargs, LEVELS.index(effort)
    taken = [(abs(at - place), -at) for at, one in enumerate(LEVELS) if at and one not in refused]
    if effort == "none":
        arguments = {"enable_thinking": False} | (arguments or {})
    elif taken:
        extra["reasoning_effort"] = LEVELS[-min(taken)[1]]
    now = extra.get("reasoning_effort", "the template's own")
    note = Note(EFFORT_CHANGED, f"{effort} as {now}")
    return structs.replace(request, extra=extra, template_kwargs=arguments), (note,)
