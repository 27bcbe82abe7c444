"""The token tree of a session, in memory: where do these tokens hang, and which are new?

A session's prompts share long prefixes. Every span of tokens is stored once and hangs at an
absolute position of its parent's path; a prompt is attached at its longest recorded prefix, and
only what comes after it becomes a new span. The tree only grows. What another process has added
meanwhile is not seen: a prefix found without it is still exact, merely shorter than it could be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridle.store.records import Choice, Span, SpanKind, TokenIds

DETACHED: Final = -1
"""``start`` of sampled tokens whose prompt is not known; they are no part of the tree."""

_PROMPTS_KEPT: Final = 4


@dataclass(slots=True, eq=False)
class Node:
    """A span in its place."""

    id: str | None
    """``None`` for the root, which has no tokens."""
    parent: Node | None
    start: int
    token_ids: TokenIds
    children: list[Node] = field(default_factory=list)
    """In the order of attachment; each starts inside ``(self.start, self.end]``."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Point(msgspec.Struct, frozen=True, gc=False):
    """The path of ``node``, cut after ``position`` tokens."""

    node: Node
    position: int


class Growth(msgspec.Struct, frozen=True, gc=False):
    """What a call adds to its session's tree."""

    prompt_span_id: str | None
    """The span in which the prompt ends; ``None`` for an empty or unknown prompt."""
    spans: tuple[Span, ...]


class _Prompt(msgspec.Struct, frozen=True):
    """A call's whole prompt: ``tip``'s path, cut after ``len(token_ids)``."""

    tip: Node
    token_ids: TokenIds


class TokenTree:
    """All token spans of one session."""

    def __init__(self, session_id: str, spans: Iterable[Span] = ()) -> None:
        self.session_id = session_id
        self.root = Node(None, None, 0, np.empty(0, dtype=np.uint32))
        self.tokens = 0
        """Tokens of all spans, each once."""
        self._nodes: dict[str | None, Node] = {None: self.root}
        self._ends: dict[str, list[Node]] = {}
        self._recent: OrderedDict[str, _Prompt] = OrderedDict()
        for span in parents_first(spans):
            self._insert(span)

    @property
    def size(self) -> int:
        """Bytes of tokens held in memory."""
        held = self.tokens
        for recent in self._recent.values():
            held += len(recent.token_ids)
        return 4 * held

    @property
    def nodes(self) -> int:
        """How many spans there are, the root among them."""
        return len(self._nodes)

    def dissolve(self) -> None:
        """Lets go of the nodes, which hold each other; the tree is of no use afterwards."""
        for node in self._nodes.values():
            node.children.clear()
        self._nodes.clear()

    def knows(self, call_id: str) -> bool:
        """Whether a span of this call is in the tree."""
        return call_id in self._ends

    def tokens_of(self, span_id: str) -> TokenIds:
        """A span's own tokens. Raises ``KeyError`` for an unknown span."""
        return self._nodes[span_id].token_ids

    def find(self, prompt: TokenIds, parent_call_id: str | None = None) -> Point:
        """The longest recorded prefix of ``prompt`` (``uint32[P]``).

        ``parent_call_id`` names the call that the prompt probably continues; when it does, only
        that path is compared. Among equal prefixes the named call's, then the oldest, wins.
        """
        for node in self._ends.get(parent_call_id or "", ()):
            if self._on_path(node, prompt, self._recent.get(parent_call_id or "")):
                return self._descend(Point(node, node.end), prompt)
        return self._descend(Point(self.root, 0), prompt)

    def grow(
        self,
        call_id: str,
        prompt: TokenIds | None,
        choices: Sequence[Choice],
        parent_call_id: str | None = None,
    ) -> Growth:
        """Adds a call: its prompt's unrecorded tokens, and every choice's sampled ones."""
        if prompt is None:
            detached = [
                self._sampled_span(call_id, index, choice, None, DETACHED)
                for index, choice in enumerate(choices)
            ]
            return Growth(None, tuple(detached))
        point = self.find(prompt, parent_call_id)
        spans: list[Span] = []
        tip = point.node.id
        if point.position < len(prompt):
            observed = Span(
                id=f"{call_id}.o",
                session_id=self.session_id,
                call_id=call_id,
                parent_id=tip,
                start=point.position,
                kind=SpanKind.OBSERVED,
                # A view would keep all of the prompt.
                token_ids=prompt[point.position :].copy() if point.position else prompt,
            )
            spans.append(observed)
            tip = observed.id
        for index, choice in enumerate(choices):
            spans.append(self._sampled_span(call_id, index, choice, tip, len(prompt)))
        for span in spans:
            self._insert(span)
        if parent_call_id is not None:
            self._recent.pop(parent_call_id, None)  # what continues it continues this one
        self._remember(call_id, tip, prompt)
        return Growth(tip, tuple(spans))

    def path(self, span_id: str | None, length: int) -> TokenIds:
        """``uint32[length]``: the tokens from the root to ``length`` along this span's path.

        Raises ``KeyError`` for an unknown span and ``ValueError`` when the path is shorter.
        """
        return path_ids(self._nodes[span_id], length)

    def _sampled_span(
        self, call_id: str, index: int, choice: Choice, parent_id: str | None, start: int
    ) -> Span:
        return Span(
            id=f"{call_id}.s{index}",
            session_id=self.session_id,
            call_id=call_id,
            parent_id=parent_id,
            start=start,
            kind=SpanKind.SAMPLED,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            versions=choice.versions,
        )

    def _insert(self, span: Span) -> None:
        if span.start == DETACHED:
            return
        parent = self._nodes[span.parent_id]
        node = Node(span.id, parent, span.start, span.token_ids)
        self._nodes[span.id] = node
        ends = self._ends.setdefault(span.call_id, [])
        if len(span.token_ids):
            parent.children.append(node)
            self.tokens += len(span.token_ids)
            ends[:] = [end for end in ends if end is not parent]
            ends.append(node)

    def _remember(self, call_id: str, tip: str | None, prompt: TokenIds) -> None:
        self._recent[call_id] = _Prompt(self._nodes[tip], prompt)
        if len(self._recent) > _PROMPTS_KEPT:
            self._recent.popitem(last=False)

    def _on_path(self, node: Node, prompt: TokenIds, known: _Prompt | None) -> bool:
        """Whether ``prompt`` begins with all of ``node``'s path.

        With the whole prompt of the node's call at hand (``known``) that is one comparison instead
        of one per turn.
        """
        if node.end > len(prompt):
            return False
        end = node.end
        step: Node | None = node
        while step is not None:
            if known is not None and step is known.tip:
                return np.array_equal(prompt[:end], known.token_ids[:end])
            if not np.array_equal(prompt[step.start : end], step.token_ids[: end - step.start]):
                return False
            end, step = step.start, step.parent
        return True

    def _descend(self, start: Point, prompt: TokenIds) -> Point:
        """The farthest point reached from ``start``, up to which ``prompt`` is known to match."""
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


def path_ids(node: Node, length: int) -> TokenIds:
    """``uint32[length]`` along ``node``'s path. Raises ``ValueError`` when it is shorter."""
    if node.end < length:
        raise ValueError(f"the path of span {node.id} has {node.end} tokens, not {length}")
    pieces: list[TokenIds] = []
    end, step = length, node
    while step.parent is not None:
        if step.start < end:
            pieces.append(step.token_ids[: end - step.start])
            end = step.start
        step = step.parent
    return np.concatenate(pieces[::-1]) if pieces else np.empty(0, dtype=np.uint32)


def common_prefix(left: NDArray[np.generic], right: NDArray[np.generic]) -> int:
    """How many leading elements two arrays share."""
    length = min(len(left), len(right))
    if length == 0:
        return 0
    differs = left[:length] != right[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def parents_first(spans: Iterable[Span]) -> list[Span]:
    """The spans in an order in which each one's parent comes before it.

    Detached spans come first. Raises ``ValueError`` when a parent is missing, or is its own heir.
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
