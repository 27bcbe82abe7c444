"""The token tree of a session, in memory. It finds which tokens of a call are new, and their place.

A session's prompts share long prefixes. Every span of tokens is stored once and is attached at an
absolute position of its parent's path; a prompt is attached at its longest recorded prefix, and
only the tokens after it become a new span. A tree without the spans that another process has added,
or those dropped to save memory, is still exact: it merely finds shorter prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridle.store.records import Choice, Growth, RoutedExperts, Span, SpanKind, TokenIds

DETACHED: Final = -1
"""The ``start`` of sampled tokens whose prompt is not known; they are not part of the tree."""

_NONE: Final = np.empty(0, dtype=np.uint32)


class Node:
    """A span at its place in the tree."""

    __slots__ = ("children", "end", "id", "parent", "start", "token_ids")

    def __init__(
        self, span_id: str | None, parent: Node | None, start: int, token_ids: TokenIds
    ) -> None:
        self.id = span_id
        """The id of the span; ``None`` for the root, which has no tokens."""
        self.parent = parent
        self.start = start
        self.end = start + len(token_ids)
        self.token_ids = token_ids
        self.children: list[Node] = []
        """The spans attached here, in the order of attachment; each starts inside ``(self.start,
        self.end]``."""


class Point(msgspec.Struct, frozen=True, gc=False):
    """The end of ``node``'s path when it is cut after ``position`` tokens."""

    node: Node
    position: int


class TokenTree:
    """All token spans of one session."""

    def __init__(self, session_id: str, spans: Iterable[Span] = ()) -> None:
        self.session_id = session_id
        self.root = Node(None, None, 0, _NONE)
        self.tokens = 0
        """Number of tokens of all spans, each counted once."""
        self.nodes: dict[str | None, Node] = {None: self.root}
        """The nodes by the ids of their spans; the root by ``None``."""
        self.extend(spans)

    def extend(self, spans: Iterable[Span]) -> None:
        """Add the recorded spans that are missing here. Raise as :func:`parents_first` does."""
        for span in parents_first(spans):
            if span.id not in self.nodes and span.start != DETACHED:
                self._insert(span, self.nodes[span.parent_id])

    def dissolve(self) -> None:
        """Remove all nodes, which refer to each other, so that memory is freed.

        The paths of nodes that are referenced elsewhere stay.
        """
        for node in self.nodes.values():
            node.children.clear()
        self.nodes = {None: self.root}

    def find(self, prompt: TokenIds, near: Node | None = None, known: int = 0) -> tuple[Point, int]:
        """Return the longest recorded prefix of ``prompt`` and the length shared with ``near``.

        ``prompt`` is ``uint32[P]``. The shared length is the number of tokens that the prompt
        shares with the path of ``near``.

        ``near`` is the node whose path the prompt probably continues; if it does, only the spans
        attached to it are compared. ``known`` is a number of leading tokens that are known to be on
        that path. Among equal prefixes that of ``near`` wins, then the oldest.
        """
        if near is None:
            return self._descend(Point(self.root, 0), prompt), 0
        shared = near.end if known >= near.end else common_prefix(path_ids(near, near.end), prompt)
        if shared == near.end:
            end = Point(near, shared)
            return self._descend(end, prompt) if near.children else end, shared
        return self._descend(Point(self.root, 0), prompt), shared

    def grow(
        self,
        call_id: str,
        prompt: TokenIds | None,
        choices: Sequence[Choice],
        near: Node | None = None,
        known: int = 0,
        experts: RoutedExperts | None = None,
    ) -> Growth:
        """Add a call: the unrecorded tokens of its prompt, and the sampled tokens of every choice.

        ``near`` and ``known`` are those of :meth:`find`. ``experts`` are those behind the last
        tokens of the prompt.
        """
        if prompt is None:
            sampled = self._sampled(call_id, choices, None, DETACHED)
            return Growth(None, tuple(sampled))
        point, shared = self.find(prompt, near, known)
        end, start = point.node, point.position
        spans: list[Span] = []
        if start < len(prompt):
            # A view would keep all of the prompt.
            new = prompt[start:].copy() if start else prompt
            name, observed = f"{call_id}.o", SpanKind.OBSERVED
            own = None if experts is None or len(experts) < len(new) else experts[-len(new) :]
            place = (name, self.session_id, call_id, end.id, start, observed)
            spans.append(Span(*place, new, routed_experts=own))
            end = self._insert(spans[0], end)
        sampled = self._sampled(call_id, choices, end.id, len(prompt))
        for span in sampled:
            self._insert(span, end)
        return Growth(end.id, (*spans, *sampled), shared)

    def _sampled(
        self, call_id: str, choices: Sequence[Choice], parent_id: str | None, start: int
    ) -> list[Span]:
        spans: list[Span] = []
        for index, choice in enumerate(choices):
            name, sampled = f"{call_id}.s{index}", SpanKind.SAMPLED
            ids, logprobs, versions = choice.token_ids, choice.logprobs, choice.versions
            spans.append(
                Span(
                    name,
                    self.session_id,
                    call_id,
                    parent_id,
                    start,
                    sampled,
                    ids,
                    logprobs,
                    versions,
                    choice.kept,
                    choice.routed_experts,
                )
            )
        return spans

    def drop(self, call_id: str) -> None:
        """Forget the call's spans, except those to which others are attached."""
        for node in self._of_call(call_id):
            if node is None or node.children or node.parent is None:
                continue
            if len(node.token_ids):
                node.parent.children.remove(node)
                self.tokens -= len(node.token_ids)
            del self.nodes[node.id]

    def path(self, span_id: str | None, length: int) -> TokenIds:
        """Return the tokens from the root to ``length`` along this span's path, ``uint32[length]``.

        Raise ``KeyError`` for an unknown span and ``ValueError`` if the path is shorter.
        """
        return path_ids(self.nodes[span_id], length)

    def _of_call(self, call_id: str) -> list[Node | None]:
        """Return the call's sampled nodes, then its observed one, or ``None`` if it has none."""
        nodes: list[Node | None] = []
        while (node := self.nodes.get(f"{call_id}.s{len(nodes)}")) is not None:
            nodes.append(node)
        return [*nodes, self.nodes.get(f"{call_id}.o")]

    def _insert(self, span: Span, parent: Node) -> Node:
        node = self.nodes[span.id] = Node(span.id, parent, span.start, span.token_ids)
        if len(span.token_ids):
            parent.children.append(node)
            self.tokens += len(span.token_ids)
        return node

    def _descend(self, start: Point, prompt: TokenIds) -> Point:
        """Return the farthest point below ``start`` that ``prompt`` matches.

        It is known to match up to ``start``.
        """
        best, open_points = start, [start]
        while open_points:
            point = open_points.pop()
            if point.position > best.position:
                best = point
            if best.position == len(prompt):
                return best
            for child in reversed(point.node.children):
                at = child.start
                if at > point.position or at >= len(prompt) or prompt[at] != child.token_ids[0]:
                    continue
                matched = common_prefix(prompt[at:], child.token_ids)
                open_points.append(Point(child, at + matched))
        return best


def path_nodes(node: Node, length: int) -> Iterator[tuple[Node, int]]:
    """Yield the nodes of a path of ``length`` tokens from its end to the root.

    Each comes with the number of its tokens that are on the path.
    """
    step: Node = node
    while step.parent is not None:
        if step.start < length:
            yield step, length - step.start
            length = step.start
        step = step.parent


def path_ids(node: Node, length: int, more: TokenIds = _NONE, first: int = 0) -> TokenIds:
    """Return the tokens from ``first`` to ``length`` along ``node``'s path, then ``more``.

    They are ``uint32``. Raise ``ValueError`` if the path is shorter.
    """
    if node.end < length:
        raise ValueError(f"the path of span {node.id} has {node.end} tokens, not {length}")
    pieces, step = [more], node
    while step.parent is not None and length > first:
        if step.start < length:
            pieces.append(step.token_ids[max(0, first - step.start) : length - step.start])
            length = step.start
        step = step.parent
    return np.concatenate(pieces[::-1])


def parting(node: Node, length: int, tip: Node) -> int:
    """Return the number of leading tokens that two paths share.

    The one is ``length`` tokens along ``node``'s path, the other the whole path of ``tip``. The
    cost grows with the tokens after the span that both paths have, not with the paths.
    """
    one, other, shared = node, tip, min(length, tip.end)
    while one is not other:
        # A span starts after its parent, so the one that starts later is not on the other's path.
        if one.start >= other.start and one.parent is not None:
            one, shared = one.parent, min(shared, one.start)
        elif other.parent is not None:
            other, shared = other.parent, min(shared, other.start)
        else:
            break
    rest = path_ids(node, length, first=shared), path_ids(tip, tip.end, first=shared)
    return shared + common_prefix(*rest)


def common_prefix(left: NDArray[np.generic], right: NDArray[np.generic]) -> int:
    """Return the number of leading elements that two arrays share."""
    length = min(len(left), len(right))
    if length == 0:
        return 0
    # Not argmax: it lets go of the interpreter's lock, and the writing thread would run in between.
    first = (left[:length] != right[:length]).tobytes().find(1)
    return first if first >= 0 else length


def parents_first(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in an order in which each one's parent comes before it.

    Detached spans come first. Raise ``ValueError`` if a parent is missing or spans form a cycle.
    """
    waiting: dict[str, list[Span]] = {}
    ready: list[Span] = []
    total = 0
    for span in spans:
        total += 1
        if span.parent_id is None:
            ready.append(span)
        else:
            waiting.setdefault(span.parent_id, []).append(span)
    for span in ready:
        ready.extend(waiting.pop(span.id, ()))
    if len(ready) != total:
        orphans = sorted(waiting)
        raise ValueError(f"spans hang on missing parents: {', '.join(orphans[:3])}")
    return ready
