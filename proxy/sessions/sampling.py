"""A session's sampling policy: what the server pins or caps, whatever the client asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bridle.proxy.settings import Budget
from bridle.proxy.wire.canonical import Sampling
from bridle.store.records import Note

_UNSAID: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What engines take where nobody says; the other parameters are without bound then."""


def effective(asked: Sampling, settings: Mapping[str, Any]) -> tuple[Sampling, tuple[Note, ...]]:
    """``asked`` under ``settings``: ``pin`` replaces, ``cap`` is an upper bound, ``default`` fills
    what the client left out. Each value that overrides the client's is noted.

    Settings look like ``{"pin": {"temperature": 1.0}, "cap": {"max_tokens": 512}}``.
    """
    changes: dict[str, Any] = {}
    notes: list[Note] = []
    for name, value in settings.get("default", {}).items():
        if getattr(asked, name) is None:
            changes[name] = value
    for name, value in settings.get("cap", {}).items():
        given = changes.get(name, getattr(asked, name))
        if given is None:
            changes[name] = min(value, _UNSAID.get(name, value))
        elif given > value or (name == "top_k" and given < 1):  # less than 1 stands for all
            changes[name] = value
            notes.append(Note("sampling_capped", name))
    for name, value in settings.get("pin", {}).items():
        given = getattr(asked, name)
        changes[name] = value
        if given is not None and given != value:
            notes.append(Note("sampling_pinned", name))
    if not changes:
        return asked, ()
    return msgspec.structs.replace(asked, **changes), tuple(notes)


class _Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pin: _Rules = _Rules()
    cap: _Rules = _Rules()
    default: _Rules = _Rules()
    budget: Budget = Budget()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` naming the field that is neither a sampling rule nor a budget."""
    try:
        msgspec.convert(settings, _Settings)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
