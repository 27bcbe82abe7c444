"""A session's verified token tree, and the branches that must be delivered from it.

A branch is the path from the root to sampled tokens that no later call continues in full. Every
sampled token lies on at least one branch. A span that does not start inside its parent, or a prompt
that does not end in the span recorded for it, raises :class:`BrokenTree`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridle.errors import BridleError
from bridle.store.reading.queries import CallRow, SpanRow
from bridle.store.records import Span, SpanKind, TokenIds, VersionRun
from bridle.store.tree import DETACHED, Node, TokenTree, parents_first, path_ids, path_nodes


class BrokenTree(BridleError, ValueError):
    """The spans of a session contradict its calls; ``bridle audit`` names where."""


@dataclass(frozen=True, slots=True)
class SpanPiece:
    """The first ``take`` tokens of a span, as a branch passes through it."""

    row: SpanRow
    take: int
    trains: tuple[tuple[int, int], ...] = ()
    """Ranges ``[start, end)`` within the span of the tokens that a sample of this branch trains."""

    @property
    def span(self) -> Span:
        return self.row.span

    @property
    def trained(self) -> int:
        return sum(end - start for start, end in self.trains)


Branch = tuple[SpanPiece, ...]
"""A path through the tree, root first, that ends with all of a sampled span."""


class SessionTree:
    """The calls and spans of one session, verified against each other."""

    def __init__(self, session_id: str, calls: Sequence[CallRow], rows: Sequence[SpanRow]) -> None:
        """Verify the spans and prompts. Raise :class:`BrokenTree` if they contradict each other."""
        self.session_id = session_id
        self.calls: Mapping[str, CallRow] = {call.id: call for call in calls}
        """Calls by id, in the order of their start."""
        by_id = {row.span.id: row for row in rows}
        try:
            ordered = parents_first(row.span for row in rows)
        except ValueError as error:
            raise BrokenTree(str(error)) from error
        self.rows: Mapping[str, SpanRow] = {span.id: by_id[span.id] for span in ordered}
        """Rows by span id, parents before children."""
        for span in ordered:
            self._verify_span(span)
        self._nodes = TokenTree(session_id, ordered).nodes
        for call in calls:
            self._verify_prompt(call)

    def branches(self) -> list[Branch]:
        """Return all branches, ordered by the start of their last calls and then by choice.

        Spans outside the tree (``bridle.store.tree.DETACHED``) are on no branch.
        """
        leaves = {row.span.id for row in self._leaves()}
        return [self.branch(row) for row in self.attached() if row.span.id in leaves]

    def branch(self, leaf: SpanRow) -> Branch:
        """Return the path that ends with all of ``leaf``'s tokens."""
        return tuple(self.path(leaf.span.id, leaf.span.end))

    def path(self, span_id: str | None, length: int) -> list[SpanPiece]:
        """Return the pieces of the first ``length`` tokens of a span's path, root first.

        Raise :class:`BrokenTree` if the path is shorter.
        """
        node = self._node(span_id)
        if node.end < length:
            raise BrokenTree(f"the path of span {span_id} ends before token {length}")
        steps = path_nodes(node, length)
        return [SpanPiece(self.rows[step.id or ""], take) for step, take in steps][::-1]

    def prompt(self, call: CallRow) -> TokenIds | None:
        """Return the prompt of a call, ``uint32[P]``.

        The result is ``None`` if the engine did not report it.
        """
        if call.prompt_tokens is None:
            return None
        return path_ids(self._node(call.prompt_span_id), call.prompt_tokens)

    def sampled(self) -> list[SpanRow]:
        """Return every sampled span with tokens, in the order of calls and choices.

        Detached spans are included.
        """
        found = [row for row in self.rows.values() if row.span.kind is SpanKind.SAMPLED]
        order = {call_id: index for index, call_id in enumerate(self.calls)}
        found = [row for row in found if len(row.span.token_ids)]
        return sorted(found, key=lambda r: (order.get(r.span.call_id, -1), r.choice or 0))

    def attached(self) -> list[SpanRow]:
        """Return the sampled spans that a branch can end with.

        They are the spans in the tree whose call is known.
        """
        found = (row for row in self.sampled() if row.span.start != DETACHED)
        return [row for row in found if row.span.call_id in self.calls]

    def _leaves(self) -> list[SpanRow]:
        """Return the sampled spans whose last token is on no branch of a call below them."""
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

    def _node(self, span_id: str | None) -> Node:
        node = self._nodes.get(span_id)
        if node is None:
            raise BrokenTree(f"span {span_id} is missing")
        return node

    def _verify_span(self, span: Span) -> None:
        if span.start == DETACHED:
            return
        if span.parent_id is None:
            if span.start != 0:
                raise BrokenTree(f"span {span.id} hangs at {span.start} of the root")
            return
        parent = self.rows[span.parent_id].span
        if parent.start == DETACHED:
            raise BrokenTree(f"span {span.id} hangs on span {parent.id}, whose place is not known")
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


def version_ranges(span: Span) -> list[tuple[int, int, VersionRun]]:
    """Return ``(start, end, run)`` for each policy version that sampled in this span."""
    if len(span.versions) == 1:
        (only,) = span.versions
        return [(only.start, len(span.token_ids), only)]
    ends = [run.start for run in span.versions[1:]] + [len(span.token_ids)]
    return [(run.start, end, run) for run, end in zip(span.versions, ends, strict=True)]
