"""A provider's reasoning effort in the words that engines know."""

from __future__ import annotations

from typing import Any, Final

from bridle.proxy.dialects.turns import Transcript

_EFFORTS: Final = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def apply_effort(
    effort: str | None, template_kwargs: dict[str, Any] | None, transcript: Transcript
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fields to forward and the template's arguments for a client's ``effort``.

    ``"none"`` switches thinking off in templates that can; unknown words are dropped with a note.
    """
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
