"""A provider's reasoning effort in the words that engines know."""

from __future__ import annotations

from typing import Final

from bridle.proxy.dialects.body import Json, writable
from bridle.proxy.dialects.transcript import Transcript

_EFFORTS: Final = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def apply_effort(
    effort: str | None, template_kwargs: Json | None, transcript: Transcript
) -> tuple[Json, Json | None]:
    """Return the fields to forward and the template's arguments for a client's ``effort``.

    The client's own ``template_kwargs`` are ``chat_template_kwargs`` of its body.

    ``"none"`` disables thinking in templates that can; unknown words are dropped with a note.
    """
    writable(template_kwargs, "chat_template_kwargs")
    if effort is None:
        return {}, template_kwargs
    if effort == "none":
        return {}, {"enable_thinking": False, **(template_kwargs or {})}
    known = _EFFORTS.get(effort)
    if known is None:
        transcript.note("field_dropped", f"reasoning effort {effort[:32]!r}")
        return {}, template_kwargs
    if known != effort:
        transcript.note("effort_converted", f"{effort} as {known}")
    return {"reasoning_effort": known}, template_kwargs
