"""The rules in a session's settings: pins and caps of sampling parameters, and a budget.

A budget is checked when a call begins; a running call may end. The use is read from the store, so
every process on it gets the same number. Running calls of this process are added to it, and those
of other processes are not, so several processes may overdraw by the calls that they begin at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from bridle.proxy.session.session import Session
from bridle.proxy.settings import Budget
from bridle.proxy.wire.canonical import ApiError, Sampling
from bridle.store.reading.queries import Reader
from bridle.store.records import Note, SessionRecord

_DEFAULTS: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The values that engines use for parameters that a request leaves out. All other parameters are
unbounded if left out."""


def effective(
    asked: Sampling, settings: Mapping[str, Any], *, pinned: bool = True
) -> tuple[Sampling, tuple[Note, ...]]:
    """Return ``asked`` under ``settings``, with a note for each value that overrides the client's.

    ``pin`` replaces a value, ``cap`` is an upper bound, and ``default`` fills in what the client
    left out. ``pinned`` is whether pins apply, which are for the policy and not for another
    provider's model.

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
            changes[name] = min(value, _DEFAULTS.get(name, value))
        elif given > value or (name == "top_k" and given < 1):  # less than 1 stands for all
            changes[name] = value
            notes.append(Note("sampling_capped", name))
    for name, value in settings.get("pin", {}).items() if pinned else ():
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


class EditedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an edited reply."""

    name: str
    arguments: dict[str, Any] = {}


class EditedReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reply that the agent gets in place of a recorded one."""

    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[EditedCall, ...] = ()


class Edits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text in place of recorded text, in the prompt of the first live call."""

    system: str | None = None
    """The text of the first system message."""
    tool_results: dict[str, str] = {}
    """Results by the recorded ids of their tool calls."""
    reply: EditedReply | None = None
    """The reply to the call before the first live one. The agent acts on it, so that the first live
    call is the agent's own and not the recorded one."""


class ReplayRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a session that re-enters a recorded one."""

    on_divergence: Literal["stop", "live"] = "stop"
    """``stop`` refuses a request that differs from the recorded one, and all later ones; ``live``
    sends it to the engine."""
    noise: dict[str, str] = {}
    """Regular expressions by name. Text that matches one on both sides counts as equal."""
    model: str | None = None
    """The model that live calls ask instead of the one that the harness names."""
    edit: Edits = Edits()
    """Text that the first live call and those after it see in place of recorded text."""
    pace: Literal["instant", "recorded"] = "instant"
    """``recorded`` sends each reply as long after the first request as it was recorded, so that
    work in the background ends at the same turn."""


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pin: _Rules = _Rules()
    cap: _Rules = _Rules()
    default: _Rules = _Rules()
    budget: Budget = Budget()
    replay: ReplayRules = ReplayRules()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` naming the field that is neither a sampling rule nor a budget."""
    try:
        msgspec.convert(settings, _Settings)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


class Budgets:
    """The sessions' budgets: ``budget`` of a session's own settings over the proxy's default."""

    def __init__(self, reader: Reader, default: Budget) -> None:
        self._reader = reader
        self.default = None if default == Budget() else default
        """The proxy's default budget; ``None`` if it has no bound."""

    def of(self, settings: Mapping[str, Any]) -> Budget | None:
        """Return the budget of a session with such settings, or ``None`` if it has none."""
        own = settings.get("budget")
        if not own:
            return self.default
        return msgspec.structs.replace(self.default or Budget(), **own)

    async def refusal(self, session: Session, budget: Budget) -> tuple[ApiError, Note] | None:
        """Return the error and the note that refuse the session's next call.

        Return ``None`` if the call is permitted. Ask before the call begins.
        """
        record = session.record
        if budget.wall_s is not None and session.age() >= budget.wall_s:
            return _exhausted("wall_s", f"{budget.wall_s:g} s of time", record)
        if budget.calls is None and budget.tokens is None:
            return None
        before = tuple(session.running)
        calls, tokens = await asyncio.to_thread(self._reader.spent, session.id, before)
        calls += len(session.running.union(before))
        if budget.calls is not None and calls >= budget.calls:
            return _exhausted("calls", f"{budget.calls} calls", record)
        if budget.tokens is not None and tokens >= budget.tokens:
            return _exhausted("tokens", f"{budget.tokens} sampled tokens", record)
        return None


def _exhausted(name: str, amount: str, session: SessionRecord) -> tuple[ApiError, Note]:
    # Qwen Code repeats a 429 for minutes, unless its message has the time of the quota's reset.
    message = (
        f"You exceeded your current quota: session {session.id} has used its {amount}, and nothing "
        "but a new session will reset it."
    )
    return ApiError("budget", message, status=429), Note("budget_exhausted", name)
