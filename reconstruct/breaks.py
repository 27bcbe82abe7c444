"""The reasons why prompts left the tokens of the calls that they continue, from the record alone.

The proxy records that a prompt broke, and the reason only if lineage found it; otherwise the call
is ``unexplained``. Here the place where the ids part shows which reply, or which observed turn, was
rewritten. What the harness changed of it is recorded with the call that echoed it
(``LineageState.differs``); everything else was changed by the template or by the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from bridle.store.reading.conversation import ReplyId, base, lineage_of
from bridle.store.reading.queries import CallRow
from bridle.store.records import (
    ALSO_BROKE_ON,
    BreakReason,
    Message,
    Note,
    Span,
    TokenIds,
    span_id,
)
from bridle.store.tree import Node, TokenTree, common_prefix, parting, path_ids

_UNKNOWN: Final = (BreakReason.UNEXPLAINED,)


def explained(calls: Sequence[CallRow], spans: Sequence[Span]) -> list[CallRow]:
    """Return the calls of one session, in the same order, with the reasons of their breaks.

    Raise ``ValueError`` if a span's parent is missing.
    """
    if all(call.break_reason is not BreakReason.UNEXPLAINED for call in calls):
        return list(calls)
    by_id = {call.id: call for call in calls}
    tree = TokenTree("", spans)
    return [
        _with_reasons(call, reasons(call, by_id, tree))
        if call.break_reason is BreakReason.UNEXPLAINED
        else call
        for call in calls
    ]


def _with_reasons(call: CallRow, found: Sequence[BreakReason]) -> CallRow:
    others = tuple(Note(ALSO_BROKE_ON, reason.value) for reason in found[1:])
    return replace(call, break_reason=found[0], notes=(*call.notes, *others))


def reasons(
    call: CallRow, calls: Mapping[str, CallRow], tree: TokenTree
) -> tuple[BreakReason, ...]:
    """Return the reasons why the prompt of ``call`` leaves the path of its base.

    The reason of the first difference comes first, then those of others in the same reply. ``tree``
    is the session's.
    """
    continued = base(call)
    tip = None if continued is None else _node(tree, continued)
    prompt = tree.nodes.get(call.prompt_span_id)
    if continued is None or tip is None or prompt is None or continued.call_id not in calls:
        return _UNKNOWN
    length = call.prompt_tokens or 0
    parted = parting(prompt, length, tip)
    reply, echo = _parted_reply(continued, call, parted, calls, tree)
    asked, lineage, echoed = calls[reply.call_id], lineage_of(call), lineage_of(echo)
    before, start = lineage_of(asked), asked.prompt_tokens or 0
    if lineage is None or echoed is None or before is None:
        return _UNKNOWN
    if parted < start:
        if lineage.digests.system_form != before.digests.system_form:
            return (BreakReason.SYSTEM_CHANGED,)
        edited = any(name.endswith("_form") for name in echoed.differs)
        return (BreakReason.EDITED if edited else BreakReason.TEMPLATE_REWROTE_HISTORY,)
    node = _node(tree, reply)
    if node is None or reply.choice >= len(asked.replies):
        return _UNKNOWN
    written = path_ids(prompt, length, first=start)
    return _of_reply(asked.replies[reply.choice], echoed.differs, node.token_ids, written)


def _node(tree: TokenTree, reply: ReplyId) -> Node | None:
    return tree.nodes.get(span_id(reply.call_id, reply.choice))


def _parted_reply(
    last: ReplyId, call: CallRow, parted: int, calls: Mapping[str, CallRow], tree: TokenTree
) -> tuple[ReplyId, CallRow]:
    """Return the reply at which the ids part, and the call whose request echoed it first.

    The reply is the first on the path up to ``last`` that ends after the place where the ids part.
    """
    reply, echo = last, call
    while True:
        asked = calls[reply.call_id]
        above = base(asked)
        tip = None if above is None else _node(tree, above)
        if above is None or tip is None or tip.end <= parted or above.call_id not in calls:
            return reply, echo
        if parting(tree.nodes[asked.prompt_span_id], asked.prompt_tokens or 0, tip) < tip.end:
            return reply, echo
        reply, echo = above, asked


def _of_reply(
    reply: Message, differs: Collection[str], sampled: TokenIds, written: TokenIds
) -> tuple[BreakReason, ...]:
    """Return the reasons for ids that part within a reply.

    They are in the order in which a template writes the reply's parts. ``differs`` names what the
    harness changed, ``sampled`` are the reply's ids, and ``written`` are the prompt's from there
    on.
    """
    kept = common_prefix(sampled, written)
    if kept == len(sampled) - 1:
        return (BreakReason.TEMPLATE_REWROTE_HISTORY,)  # only the token that ended the reply
    found = []
    if reply.reasoning and "reasoning" in differs:
        found.append(BreakReason.REASONING_DROPPED)
    if not {"text", "order", "reasoning_edited"}.isdisjoint(differs):
        found.append(BreakReason.EDITED)
    if "arguments" in differs or any(_rewritten(call.arguments) for call in reply.tool_calls):
        found.append(BreakReason.ARGUMENTS_RESERIALISED)
    if "whitespace" in differs:
        found.append(BreakReason.EDITED)
    if found:
        return tuple(dict.fromkeys(found))
    text = reply.content if isinstance(reply.content, str) else ""
    ends_early = kept < len(written) and written[kept] == sampled[-1]
    if reply.reasoning or text != text.strip() or ends_early:
        # The harness said the same; templates strip thoughts and white space.
        return (BreakReason.TEMPLATE_REWROTE_HISTORY,)
    return (BreakReason.RETOKENISED,)


def _rewritten(arguments: str) -> bool:
    """Return whether a template that serialises arguments anew writes them in another way."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False) != arguments
    except ValueError:
        return False
