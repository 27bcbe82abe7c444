"""A recorded session as a token tree again, and the branches that must be delivered from it.

A branch is the path from the root to sampled tokens that no later call continues in full. Every
sampled token lies on at least one branch. The tree checks what it is built from: a child that does
not hang inside its parent, or a prompt whose path is shorter than recorded, is a
:class:`BrokenTree`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bridle.errors import BridleError
from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.store.errors import NotFound
from bridle.store.reading.queries import CallRow, Reader, SpanRow
from bridle.store.records import Span, SpanKind, TokenIds
from bridle.store.tree import DETACHED, parents_first


class BrokenTree(BridleError, ValueError):
    """The stored spans do not form the tree that the calls say; ``bridle audit`` names where."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The first ``take`` tokens of a span, as a branch passes through it."""

    row: SpanRow
    take: int

    @property
    def span(self) -> Span:
        return self.row.span


@dataclass(frozen=True, slots=True)
class Branch:
    """A path through the tree, root first, ending with all of a sampled span."""

    pieces: tuple[Piece, ...]
    leaf: CallRow
    """The call that sampled the last piece."""

    @property
    def length(self) -> int:
        """Tokens of the whole path."""
        return self.pieces[-1].span.start + self.pieces[-1].take


class SessionTree:
    """The calls and spans of one session, verified against each other."""

    def __init__(self, session_id: str, calls: Sequence[CallRow], rows: Sequence[SpanRow]) -> None:
        """Raises :class:`BrokenTree`."""
        self.session_id = session_id
        self.calls: Mapping[str, CallRow] = {call.id: call for call in calls}
        """In the order of their start."""
        by_id = {row.span.id: row for row in rows}
        try:
            ordered = parents_first(row.span for row in rows)
        except ValueError as error:
            raise BrokenTree(str(error)) from error
        self.rows: Mapping[str, SpanRow] = {span.id: by_id[span.id] for span in ordered}
        """By span, parents before children."""
        for row in self.rows.values():
            self._verify_span(row.span)
        for call in calls:
            self._verify_prompt(call)

    @classmethod
    def load(cls, reader: Reader, session_id: str) -> SessionTree:
        """The session as the store has it, its calls' kinds told. Raises :class:`BrokenTree`, also
        for stored values that are damaged."""
        try:
            calls, rows = reader.recorded(session_id)
            calls = with_kinds(calls)
        except (NotFound, ValueError) as error:
            raise BrokenTree(str(error)) from error
        return cls(session_id, calls, rows)

    def branches(self) -> list[Branch]:
        """All branches, in the order in which their last calls began (then by choice).

        Spans outside the tree (``bridle.store.tree.DETACHED``) are on none.
        """
        order = {call_id: index for index, call_id in enumerate(self.calls)}
        leaves = [row for row in self._leaves() if row.span.call_id in order]
        leaves.sort(key=lambda row: (order[row.span.call_id], row.choice or 0))
        return [self.branch(row) for row in leaves]

    def branch(self, leaf: SpanRow) -> Branch:
        """The path that ends with all of ``leaf``'s tokens."""
        pieces = self.path(leaf.span.id, leaf.span.end)
        return Branch(tuple(pieces), self.calls[leaf.span.call_id])

    def path(self, span_id: str | None, length: int) -> list[Piece]:
        """What the first ``length`` tokens of a span's path are made of, root first.

        Raises :class:`BrokenTree` when the path is shorter.
        """
        pieces: list[Piece] = []
        end, link = length, span_id
        while link is not None:
            row = self.rows.get(link)
            if row is None:
                raise BrokenTree(f"span {link} is missing")
            if row.span.start < end:
                if row.span.end < end:
                    raise BrokenTree(f"the path of span {span_id} ends before token {length}")
                pieces.append(Piece(row, end - row.span.start))
                end = row.span.start
            link = row.span.parent_id
        if end:
            raise BrokenTree(f"the path of span {span_id} does not begin at the root")
        return pieces[::-1]

    def prompt(self, call: CallRow) -> TokenIds | None:
        """``uint32[P]``: the prompt of a call; ``None`` when the engine did not tell it."""
        if call.prompt_tokens is None:
            return None
        return _joined(self.path(call.prompt_span_id, call.prompt_tokens))

    def ids(self, span: Span) -> TokenIds:
        """``uint32[span.end]``: the whole path that ends with all of ``span``."""
        return _joined(self.path(span.id, span.end))

    def sampled(self) -> list[SpanRow]:
        """Every sampled span with tokens, detached ones included, calls in order."""
        found = [row for row in self.rows.values() if row.span.kind is SpanKind.SAMPLED]
        order = {call_id: index for index, call_id in enumerate(self.calls)}
        found = [row for row in found if len(row.span.token_ids)]
        return sorted(found, key=lambda r: (order.get(r.span.call_id, -1), r.choice or 0))

    def _leaves(self) -> list[SpanRow]:
        """Sampled spans whose last token is on no branch of a call below them."""
        carries: dict[str, bool] = {}
        continued: set[str] = set()
        leaves: list[SpanRow] = []
        for row in reversed(list(self.rows.values())):
            span = row.span
            sampled = span.kind is SpanKind.SAMPLED and len(span.token_ids) > 0
            if sampled and span.start != DETACHED and span.id not in continued:
                leaves.append(row)
            if (sampled or carries.get(span.id, False)) and span.parent_id is not None:
                carries[span.parent_id] = True
                if span.start == self.rows[span.parent_id].span.end:
                    continued.add(span.parent_id)
        return leaves

    def _verify_span(self, span: Span) -> None:
        if span.start == DETACHED:
            return
        if span.parent_id is None:
            if span.start != 0:
                raise BrokenTree(f"span {span.id} hangs at {span.start} of the root")
            return
        parent = self.rows[span.parent_id].span
        if not parent.start < span.start <= parent.end:
            raise BrokenTree(
                f"span {span.id} starts at {span.start}, outside its parent's "
                f"({parent.start}, {parent.end}]"
            )

    def _verify_prompt(self, call: CallRow) -> None:
        if not call.prompt_tokens:
            return
        row = self.rows.get(call.prompt_span_id or "")
        if row is None or not row.span.start < call.prompt_tokens <= row.span.end:
            raise BrokenTree(
                f"the prompt of call {call.id} has {call.prompt_tokens} tokens, which do not end "
                f"in span {call.prompt_span_id}"
            )


def _joined(pieces: Sequence[Piece]) -> TokenIds:
    if not pieces:
        return np.empty(0, dtype=np.uint32)
    return np.concatenate([piece.span.token_ids[: piece.take] for piece in pieces])
