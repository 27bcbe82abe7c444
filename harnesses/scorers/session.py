"""A finished session as a scorer gets it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.tasks.task import Task


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the session, as the proxy recorded it."""

    turn: int
    """The number of the call, from 1."""
    id: str
    """The call's id."""
    continues: int | None = None
    """The turn of the call that this one continues."""
    role: str | None = None
    kind: str = "unknown"
    """The purpose of the call, if it is known: ``main``, ``subagent``, ``side``, …"""
    status: str = "complete"
    reason: str | None = None
    """The reason why the call failed or was cut."""
    finish_reason: str | None = None
    messages: list[dict[str, Any]] = []
    """The chat messages that the request added, such as outputs of tools."""
    replies: list[dict[str, Any]] = []
    """The reply of each choice as a chat message."""
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    started_at: float = 0.0
    ended_at: float | None = None
    model: str = ""

    @property
    def seconds(self) -> float:
        """Seconds from the request to the end of the reply; 0 if it has not ended."""
        return 0.0 if self.ended_at is None else self.ended_at - self.started_at

    @property
    def text(self) -> str:
        """The text of the first reply, without reasoning and tool calls."""
        content = self.replies[0].get("content") if self.replies else None
        return content if isinstance(content, str) else ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the first reply, in chat form."""
        return list(self.replies[0].get("tool_calls") or ()) if self.replies else []


Ask = Callable[[str, Sequence[Mapping[str, Any]], int], Awaitable[str]]
"""A function that returns a model's reply, given the model's name, the messages and the maximum
number of tokens. Raise :class:`bridle.harnesses.verifiers.VerifierError` without one."""


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """A session whose agent has ended and whose verifier has scored it."""

    id: str
    task: Task
    turns: tuple[Turn, ...]
    """All calls, in the order of their start."""
    outcome: str
    answer: str
    scores: Mapping[str, float]
    """The verifier's scores of the session as a whole."""
    seconds: float
    """Seconds that the harness ran."""
    artefacts: Mapping[str, bytes] = field(default_factory=dict)
    """The contents of the files of the workspace that the run names, if the agent left them."""
    bounds: Bounds = field(default_factory=Bounds)
    ask: Ask | None = None
    """A function that asks a model through the proxy, for ``async`` scorers."""

    @property
    def roles(self) -> dict[str | None, tuple[Turn, ...]]:
        names = dict.fromkeys(turn.role for turn in self.turns)
        return {name: tuple(one for one in self.turns if one.role == name) for name in names}

    @property
    def branches(self) -> tuple[tuple[Turn, ...], ...]:
        """The paths of turns that continue each other, each from its first turn to its last.

        The id of the last turn is the ``branch`` of a :class:`bridle.harnesses.verifiers.Score`.
        """
        by_turn = {one.turn: one for one in self.turns}
        continued = {one.continues for one in self.turns}
        return tuple(_path(by_turn, one) for one in self.turns if one.turn not in continued)

    def argument(self) -> FinishedSession:
        """Return the argument of a scorer's function."""
        return self

    def sendable(self) -> FinishedSession:
        """Return the session in the form that crosses to another process, which asks no model."""
        return replace(self, ask=None)


def _path(by_turn: Mapping[int, Turn], last: Turn) -> tuple[Turn, ...]:
    path = [last]
    while (before := by_turn.get(path[-1].continues or 0)) is not None and before not in path:
        path.append(before)
    return tuple(reversed(path))
