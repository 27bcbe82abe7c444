"""A request and its link in the form that the engine gets.

The engine's own tool-call ids stand for the minted ones, and the messages have an order of roles
that the model's template takes. The record keeps what the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import structs

from bridle.proxy.continuation.roles import TAKES_ALL, TOOLS_NOT_SHOWN, RoleRules
from bridle.proxy.session.engine_ids import with_engine_ids
from bridle.proxy.session.turn import Link
from bridle.proxy.wire.canonical import Request
from bridle.store.records import Note


class EngineForm(NamedTuple):
    """The request and the link from which the prompt is made."""

    request: Request
    link: Link
    """The link, with its tail and its count of leading system messages as in ``request``."""
    notes: tuple[Note, ...]


def engine_form(
    request: Request, link: Link, engine_ids: Mapping[str, str], rules: RoleRules | None
) -> EngineForm:
    """Return ``request`` and ``link`` as the engine gets them.

    ``engine_ids`` has the engine's own tool-call ids, by the ids that clients were sent. ``rules``
    is ``None`` if the template's are not known.
    """
    notes: tuple[Note, ...] = ()
    if engine_ids:
        request = structs.replace(request, messages=with_engine_ids(request.messages, engine_ids))
        link = structs.replace(link, tail=with_engine_ids(link.tail, engine_ids))
    if rules is None or rules == TAKES_ALL:
        return EngineForm(request, link, notes)
    messages, notes = rules.shape(request.messages)
    if request.tools and not rules.tools_shown:
        notes += (Note(TOOLS_NOT_SHOWN),)
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    return EngineForm(
        structs.replace(request, messages=messages),
        structs.replace(link, tail=rules.shape_tail(link.tail), head=head),
        notes,
    )
