"""The deltas of a streamed chat reply, into which its text is parsed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolName:
    """The beginning of a function call; ``index`` counts the reply's calls from 0."""

    index: int
    name: str
    id: str | None = None
    """The id that the model has given to the call, if its markup has one."""


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | Reasoning | ToolName | ToolArguments
