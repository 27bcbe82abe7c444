"""The difference between a call and the conversation that it continues, in text and in tokens."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

import numpy as np

from bridle.diagnosis.transcript import content_text
from bridle.reconstruct.conversation import (
    ChatMessage,
    RecordedMessage,
    new_messages,
    whole_conversation,
)
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.reading.conversation import IncompleteConversation, ReplyId, base
from bridle.store.reading.queries import CallRow
from bridle.store.records import TokenIds
from bridle.viewer.turns import TokenTexts

CONTEXT: Final = 24
"""The number of tokens shown before the first difference; three times as many follow it."""

_LINES: Final = 400
"""Maximum number of lines of each conversation that are compared."""

Change = Literal["same", "removed", "added", "gap"]


@dataclass(frozen=True, slots=True)
class DiffLine:
    change: Change
    text: str


@dataclass(frozen=True, slots=True)
class TokenDiff:
    """The recorded path and the new prompt, around their first difference."""

    shared: int
    """Number of leading tokens that are the same."""
    recorded: int
    """Number of tokens in the parent's prompt and reply."""
    prompt: int
    """Number of tokens in this call's prompt."""
    before: tuple[str, ...]
    """The texts of the last tokens that are the same."""
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def lost(self) -> int:
        """Number of recorded tokens that the new prompt does not continue."""
        return self.recorded - self.shared


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between a call and its parent."""

    lines: tuple[DiffLine, ...]
    """The text diff of the two conversations; empty if the new one begins with the whole old
    one."""
    tokens: TokenDiff | None
    problem: str | None = None
    """The reason why the texts are not compared."""


def difference(session: LoadedSession, call: CallRow, texts: TokenTexts) -> Difference | None:
    """Return a call's difference from its parent, or ``None`` if the call continues none."""
    parent = session.by_id.get(call.parent_call_id or "")
    if parent is None:
        return None
    tokens = _token_difference(session, parent, call, texts)
    choice = _continued_choice(call, parent)
    try:
        old = _lines(whole_conversation(session.by_id, ReplyId(parent.id, choice)))
        under = base(call)
        known = () if under is None else whole_conversation(session.by_id, under)
        new = _lines(known) + _message_lines([m.to_chat() for m in new_messages(call)])
    except IncompleteConversation as error:
        return Difference((), tokens, str(error))
    return Difference(tuple(_compared(old, new)), tokens)


def _continued_choice(call: CallRow, parent: CallRow) -> int:
    under = base(call)
    return under.choice if under is not None and under.call_id == parent.id else 0


def _lines(conversation: Sequence[RecordedMessage]) -> list[str]:
    return _message_lines([recorded.message for recorded in conversation])


def _message_lines(messages: Sequence[ChatMessage]) -> list[str]:
    lines: list[str] = []
    for message in messages:
        lines.append(f"── {message['role']}")
        if message.get("reasoning"):
            lines += [f"(thinking) {line}" for line in str(message["reasoning"]).splitlines()]
        lines += content_text(message.get("content")).splitlines()
        for tool in message.get("tool_calls") or ():
            lines.append(f"→ {tool['function']['name']} {tool['function']['arguments']}")
    return lines


def _compared(old: Sequence[str], new: Sequence[str]) -> list[DiffLine]:
    """Return a unified diff with three lines of context.

    Lines that follow the whole old conversation are the next turn, and no change.
    """
    shared = 0
    for one, other in zip_longest(old, new):
        if one != other:
            break
        shared += 1
    if shared >= len(old):
        return []
    start = max(0, shared - 3)
    found: list[DiffLine] = [DiffLine("gap", f"{start} lines the same")] if start else []
    before, after = old[start : start + _LINES], new[start : start + _LINES]
    # Lines are compared whole: likening them by their letters takes the cube of their number.
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for change, old_at, old_end, new_at, new_end in matcher.get_opcodes():
        if change == "equal":
            found += [DiffLine("same", line) for line in before[old_at:old_end]]
            continue
        found += [DiffLine("removed", line) for line in before[old_at:old_end]]
        found += [DiffLine("added", line) for line in after[new_at:new_end]]
    return found


def _token_difference(
    session: LoadedSession, parent: CallRow, call: CallRow, texts: TokenTexts
) -> TokenDiff | None:
    sampled = session.sampled.get(parent.id, ())
    try:
        before, prompt = session.tree.prompt(parent), session.tree.prompt(call)
    except BrokenTree:
        return None
    if before is None or prompt is None or not sampled:
        return None
    choice = min(_continued_choice(call, parent), len(sampled) - 1)
    recorded = np.concatenate([before, sampled[choice].span.token_ids])
    least = min(len(recorded), len(prompt))
    differs = np.flatnonzero(recorded[:least] != prompt[:least])
    shared = int(differs[0]) if len(differs) else least
    after = shared + 3 * CONTEXT

    def shown(ids: TokenIds) -> tuple[str, ...]:
        return tuple(texts(ids.tolist()))

    return TokenDiff(
        shared,
        len(recorded),
        len(prompt),
        shown(prompt[max(0, shared - CONTEXT) : shared]),
        shown(recorded[shared:after]),
        shown(prompt[shared:after]),
    )
