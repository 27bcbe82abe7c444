"""The reason why a rendered prompt does not continue its parent's ids, from the first difference.

The prompt that the engine rendered is compared with the ids that the parent's engine call saw and
sampled. The place where they part shows which reply (or which observed turn) was rewritten, and the
echo of that turn shows the cause: the harness, the template, or only the tokenizer. Further losses
of that reply are named after the first difference. Without the model's tokenizer the texts cannot
be read. The echo alone is then judged, which is an inference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.proxy.lineage.digests import Digester, Unit, system_digest
from bridle.proxy.lineage.match import Match, compare
from bridle.proxy.lineage.turn import Link, Turn
from bridle.proxy.wire.canonical import Message, Request
from bridle.store.records import BreakReason, TokenIds
from bridle.store.tree import common_prefix, path_nodes

if TYPE_CHECKING:
    from bridle.engine.contract.tokenizer import Tokenizer

_ROOM = 64
"""Number of ids by which a rewritten reply may be longer than the sampled one and still be read
whole."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """One reply on the base's path."""

    turn: Turn
    choice: int

    @property
    def start(self) -> int:
        return self.turn.prompt_length

    @property
    def end(self) -> int:
        tip = self.turn.tip(self.choice)
        return self.start if tip is None else tip.end


def explain(
    tokenizer: Tokenizer | None, link: Link, request: Request, ids: TokenIds, parted: int
) -> tuple[BreakReason, ...]:
    """Return the reasons why ``ids`` (the prompt of ``request`` as the engine used it) leave the
    path of the link's base after ``parted`` tokens: that of the first difference, then those of
    others in the same reply.

    ``tokenizer`` is ``None`` if the model's cannot be had.
    """
    base = link.base
    path = None if base is None else base.path_ids(link.choice)
    if base is None or path is None:
        return (BreakReason.PARENT_WITHOUT_IDS,)
    reply = _parted_reply(base, link.choice, parted)
    _, system_form, leading = system_digest(request.messages)
    units = Digester().units(request.messages, leading)
    if parted < reply.start:
        return (_observed(reply.turn, units, system_form),)
    if reply.turn.seen.depth >= len(units):
        return (BreakReason.UNEXPLAINED,)
    echo = units[reply.turn.seen.depth].message
    if echo is None:
        return (BreakReason.UNEXPLAINED,)
    sampled = path[reply.start : reply.end]
    written = ids[reply.start : reply.start + 2 * len(sampled) + _ROOM]
    if common_prefix(sampled, written) == len(sampled) - 1:
        # All was kept but the token that ended the reply.
        return (BreakReason.TEMPLATE_REWROTE_HISTORY,)
    message = reply.turn.choices[reply.choice].message
    if tokenizer is None:
        return _inferred(message, echo)
    said = tokenizer.decode(sampled.tolist())
    now = tokenizer.decode(written.tolist())
    if now.startswith(said):
        return (BreakReason.RETOKENISED,)
    first = _first(message, echo, said, now)
    return (first, *(reason for reason in _all(message, echo, said, now) if reason is not first))


def _parted_reply(base: Turn, choice: int, parted: int) -> _Reply:
    """Return the first reply on the path that ends after the place where the ids part."""
    found = at = _Reply(base, choice)
    while at.turn.base is not None:
        above = _Reply(at.turn.base, at.turn.base_choice)
        if above.end <= parted or not _continues(at.turn, above):
            break
        found = at = above
    return found


def _continues(turn: Turn, reply: _Reply) -> bool:
    """Whether the turn's prompt goes on from all of the reply's path."""
    tip = reply.turn.tip(reply.choice)
    if tip is None or turn.prompt is None:
        return False
    prompt = turn.prompt
    return any(
        node is tip and prompt.position >= tip.end
        for node, _ in path_nodes(prompt.node, prompt.position)
    )


def _observed(turn: Turn, units: Sequence[Unit], system_form: bytes) -> BreakReason:
    """Return the reason for ids that part before the reply of ``turn``, in the engine's input."""
    if turn.seen.system_form != system_form:
        return BreakReason.SYSTEM_CHANGED
    first = turn.seen.depth - len(turn.seen.forms)
    forms = tuple(unit.form for unit in units[first : turn.seen.depth])
    if forms != turn.seen.forms:
        return BreakReason.EDITED
    return BreakReason.TEMPLATE_REWROTE_HISTORY


def _first(message: Message, echo: Message, said: str, now: str) -> BreakReason:
    """Return the reason for the first difference within a reply. ``said`` is its sampled text, and
    ``now`` is the text that is rendered there."""
    parted = _common_text(said, now)
    if message.reasoning and parted <= _reasoning_end(message.reasoning, said):
        return _reasoning(message, echo)
    match = compare(message, echo)
    if match is None:
        return BreakReason.UNEXPLAINED
    if "text" in match.differs or "order" in match.differs:
        return BreakReason.EDITED
    if message.tool_calls and parted >= _calls_start(message, said):
        rewritten = any(call.arguments not in said for call in message.tool_calls)
        if rewritten or _arguments_changed(message, match, now):
            return BreakReason.ARGUMENTS_RESERIALISED
    if "whitespace" in match.differs and message.content != echo.content:
        return BreakReason.EDITED
    return BreakReason.TEMPLATE_REWROTE_HISTORY


def _all(message: Message, echo: Message, said: str, now: str) -> list[BreakReason]:
    """Return the reasons for all differences between ``said`` and ``now``, in the order in which a
    template writes a reply."""
    found = []
    reasoning = (message.reasoning or "").strip()
    if reasoning and reasoning in said and reasoning not in now:
        found.append(_reasoning(message, echo))
    match = compare(message, echo)
    if match is None:
        return found
    if match.differs & {"text", "order"}:
        found.append(BreakReason.EDITED)
    if _arguments_changed(message, match, now):
        found.append(BreakReason.ARGUMENTS_RESERIALISED)
    return found


def _reasoning(message: Message, echo: Message) -> BreakReason:
    """Return the reason that names who changed the reasoning that was sampled and is not
    rendered."""
    if not echo.reasoning:
        return BreakReason.REASONING_DROPPED
    same = echo.reasoning.split() == (message.reasoning or "").split()
    return BreakReason.TEMPLATE_REWROTE_HISTORY if same else BreakReason.EDITED


def _arguments_changed(message: Message, match: Match, now: str) -> bool:
    return "arguments" in match.differs or any(
        call.arguments not in now for call in message.tool_calls
    )


def _inferred(message: Message, echo: Message) -> tuple[BreakReason, ...]:
    """Return the reasons for ids that part within a reply whose texts cannot be read. They are
    inferred from the parts that the echo leaves out or writes anew, in the order in which a
    template would come upon them."""
    found = []
    if message.reasoning and (echo.reasoning or "").split() != message.reasoning.split():
        found.append(_reasoning(message, echo))
    match = compare(message, echo)
    if match is None:
        return (*found, BreakReason.UNEXPLAINED)
    if match.differs & {"text", "order"}:
        found.append(BreakReason.EDITED)
    if "arguments" in match.differs or any(
        _rewritten(call.arguments) for call in message.tool_calls
    ):
        found.append(BreakReason.ARGUMENTS_RESERIALISED)
    if message.content != echo.content and "whitespace" in match.differs:
        found.append(BreakReason.EDITED)
    if found:
        return tuple(dict.fromkeys(found))
    text = message.content if isinstance(message.content, str) else ""
    if message.reasoning or text != text.strip():
        # The harness said the same; templates strip thoughts and white space.
        return (BreakReason.TEMPLATE_REWROTE_HISTORY,)
    return (BreakReason.RETOKENISED,)


def _rewritten(arguments: str) -> bool:
    """Whether a template that serialises arguments anew writes them in another way."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False) != arguments
    except ValueError:
        return False


def _reasoning_end(reasoning: str, said: str) -> int:
    """Return the place in the sampled text where the reasoning and its closing mark end."""
    words = reasoning.strip()
    start = said.find(words)
    if start < 0:
        return len(said)
    end = start + len(words)
    closing = said.find(">", end)
    return max(end, closing + 1) + 2


def _calls_start(message: Message, said: str) -> int:
    """Return the place in the sampled text where the first tool call's arguments may begin."""
    text = message.content.strip() if isinstance(message.content, str) else ""
    after_text = max(0, said.find(text) + len(text)) if text else 0
    return max(0, said.find(message.tool_calls[0].name, after_text))


def _common_text(left: str, right: str) -> int:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))
