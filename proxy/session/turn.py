"""Recorded calls as lineage knows them, and the index by which a request finds them.

A turn is one call: its request, its replies, and the place of its tokens in the session's token
tree.

Turns form two trees that mostly coincide. The *parent* is the call that a request continues in
meaning. The *base* is the deepest call whose whole conversation, reply included, stands unchanged
at the start of the request. A turn keeps digests only of the steps after its base, so a session
costs memory in proportion to its own length. Parent and base differ exactly if the lineage broke,
and the break has a reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Final

import msgspec

from bridle.proxy.session.digests import Digester, digest_of, meaning_parts, spoken_text
from bridle.proxy.wire.written import Written
from bridle.store.reading.summaries import SUMMARY_LENGTH, openings, quotable
from bridle.store.records import (
    BreakReason,
    CallStatus,
    LineageState,
    Message,
    RequestDigests,
    TokenIds,
)
from bridle.store.tree import Node, Point, path_ids

TRUSTED: Final = frozenset({CallStatus.COMPLETE, CallStatus.PARTIAL})
"""The statuses of calls whose tokens later calls may continue, contradictions excepted."""


Below = tuple[str, int] | None
"""A place in the tree: below one reply of a call, or at the root."""
Key = tuple[object, ...]

_LAST: Final = 32
"""Number of characters at the end of a text that are compared before the whole."""
_ADDED_KEPT: Final = 100_000
"""Number of additions, and of comparisons, that are remembered."""


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sampled sequence of a call."""

    message: Message
    """The reply in chat shape, after the beginning that the request gave it, with the tool-call ids
    that the client was sent."""
    digest: bytes
    form: bytes
    """The digest of its form when it is echoed unchanged; ``digest`` is the one of its meaning."""
    node: Node | None = None
    """The node of its tokens; ``None`` if nothing can be built on them."""


class Ending(msgspec.Struct, frozen=True, gc=False):
    """The user's text that a request ended with, for a later one that it is the beginning of."""

    length: int
    """Number of characters."""
    last: str
    """The last of them."""
    digest: bytes

    @classmethod
    def of(cls, text: str) -> Ending:
        return cls(len(text), text[-_LAST:], _text_digest(text))

    def begins(self, text: str) -> bool:
        """Return whether a longer text begins with this one."""
        length = self.length
        return (
            len(text) > length
            and text.startswith(self.last, length - len(self.last))
            and _text_digest(text[:length]) == self.digest
        )


def _text_digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def ending_text(messages: Sequence[Message]) -> str | None:
    """Return the text of the last message if it is the user's, and nothing but text."""
    if not messages or messages[-1].role != "user":
        return None
    parts = meaning_parts(messages[-1].content)
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else None


class Turn(msgspec.Struct, frozen=True, eq=False):
    """A recorded call that is over."""

    call_id: str
    session_id: str
    parent_call_id: str | None
    status: CallStatus
    seen: RequestDigests
    base: Turn | None = None
    base_choice: int = 0
    choices: tuple[Sampled, ...] = ()
    ending: Ending | None = None
    """The text of its request's last message, if it is the user's. Calls of an earlier process have
    none."""
    prompt: Point | None = None
    """The end of its prompt. ``None`` if the engine reported no ids, or if the record is not to be
    trusted: its echo is then recognised, but nothing is built on it."""

    def __repr__(self) -> str:
        return f"Turn({self.call_id!r})"  # its bases are as many as the conversation is long

    @property
    def prompt_length(self) -> int:
        """Number of tokens in the prompt, 0 if its ids are not known."""
        return 0 if self.prompt is None else self.prompt.position

    def tip(self, choice: int = 0) -> Node | None:
        """Return the node where prompt and reply of one choice end.

        Return ``None`` if either has no ids.
        """
        if self.prompt is None or choice >= len(self.choices):
            return None
        node = self.choices[choice].node
        return node if node is not None and len(node.token_ids) else None

    def path_ids(self, choice: int = 0) -> TokenIds | None:
        """Return the ids (``uint32``) of prompt and reply of one choice.

        Return ``None`` if either has no ids.
        """
        tip = self.tip(choice)
        return None if tip is None else path_ids(tip, tip.end)


class Link(msgspec.Struct, frozen=True):
    """The place of a request in its session."""

    seen: RequestDigests
    parent: Turn | None = None
    """The call that the request continues in meaning."""
    base: Turn | None = None
    """The deepest call whose conversation stands unchanged at the request's start: the parent,
    unless the lineage broke."""
    choice: int = 0
    """The index of the base's reply that is continued."""
    rule: str | None = None
    """The rule that found the parent: ``minted_id``, ``content``, ``position`` or
    ``token_prefix``."""
    differs: tuple[str, ...] = ()
    """The names of the differences in form between this request and the parent's request and
    reply, in order."""
    confidence: float = 1.0
    """The confidence in the parent: 1.0 if an echoed id names it, less the more is inferred."""
    tail: tuple[Message, ...] = ()
    """The request's messages after the base's reply; all of them when there is no base."""
    failed: tuple[Turn, ...] = ()
    """Calls that failed at the same question, each the last of its session to ask it, the latest
    first. Like ``quoted``, they show the session of a request that has no parent if nothing else
    does."""
    quoted: Turn | None = None
    """A call of the session of which the request quotes several replies."""
    head: int = 0
    """Number of leading system messages in the request."""
    text_only: bool = False
    """True if the contents of all of the request's messages are known to be text."""
    break_reason: BreakReason | None = None
    written: Written | None = None
    """The first of the request's messages as JSON for the engine. Whoever writes more of them adds
    them here, for the next request that begins with them. ``None`` if nothing is remembered."""
    unfolded: tuple[Message, ...] | None = None
    """The request's messages in the order in which they were said, if the client folded turns into
    others (:mod:`bridle.proxy.session.folded_turns`). They take the place of its own."""
    unexplained: bool = False
    """True if the request shows a reply or an id that these turns do not account for."""
    unknown: tuple[str, ...] = ()
    """Call ids that the request echoes and this session's memory does not hold: calls that are
    still running here, or that another worker recorded."""

    def state(self) -> LineageState:
        """Return the part of the link that the store keeps."""
        base = self.base
        return LineageState(
            self.seen,
            None if base is None else base.call_id,
            0 if base is None else self.choice,
            self.differs,
            self.confidence,
        )


class TurnIndex:
    """An index of turns by id (longest out of use first), by place, by reply and by question."""

    def __init__(self, *, unrelated: bool = False) -> None:
        """Create an empty index.

        ``unrelated`` is true if the turns are of many sessions that know nothing of each other. Two
        equal conversations are then one run after another, not one that asked again.
        """
        self.unrelated = unrelated
        self.digester = Digester()
        self.turns: OrderedDict[str, Turn] = OrderedDict()
        self.found: dict[Key, list[Turn]] = {}
        """Turns by everything that they can be recognised by (:func:`_keys`), oldest first."""
        self.engine_ids: dict[str, str] = {}
        """The engine's own id of each tool call, by the id that a client was sent."""
        self.added: list[Key] = []
        """The place and first new step of each turn, in the order in which turns were added; it
        begins again when ``removals`` grows."""
        self.removals = 0
        """A number that grows when anything but an addition changes the index."""
        self.unlike: set[tuple[str, bytes]] = set()
        """Calls, with the forms of steps that were compared with their replies and are others."""
        self._deepest: dict[tuple[bytes, str | None], int] = {}
        """Number of steps of the longest request so far, by instructions and agent."""

    def add(self, turn: Turn) -> None:
        """Add a call that is over, or replace the turn that is known of it."""
        turns, found = self.turns, self.found
        if turn.call_id in turns:
            self.remove(turns[turn.call_id])
        elif max(len(self.added), len(self.unlike)) > _ADDED_KEPT:
            self._changed()
        self.added.append(_next_key(turn))
        for key in _keys(turn):
            found.setdefault(key, []).append(turn)
            if key[0] == "used" and key[1] in turns:
                turns.move_to_end(str(key[1]))
        turns[turn.call_id] = turn
        for reply in turn.choices:
            for call in reply.message.tool_calls:
                if call.engine_id is not None:
                    self.engine_ids[call.id] = call.engine_id
        speaker, depth = (turn.seen.system, turn.seen.agent), turn.seen.depth
        if depth > self._deepest.get(speaker, 0):
            self._deepest[speaker] = depth

    def _changed(self) -> None:
        self.removals += 1
        self.added.clear()
        self.unlike.clear()

    def remove(self, turn: Turn) -> None:
        self._changed()
        del self.turns[turn.call_id]
        for reply in turn.choices:
            for call in reply.message.tool_calls:
                self.engine_ids.pop(call.id, None)
        for key in _keys(turn):
            remaining = self.found[key]
            remaining.remove(turn)
            if not remaining:
                del self.found[key]

    def leaves(self) -> list[Turn]:
        """Return the turns that no other turn builds on.

        Lone calls come first, then the ends of longer lines, each longest out of use first.
        """
        bases = {turn.base.call_id for turn in self.turns.values() if turn.base is not None}
        ends = (turn for turn in self.turns.values() if turn.call_id not in bases)
        return sorted(ends, key=lambda turn: turn.base is not None)

    def replied(self, digest: bytes) -> Sequence[Turn]:
        """Return the turns with a reply of this meaning, oldest first.

        A reply with these calls beside a text counts, too.
        """
        return self.found.get(("reply", digest), ())

    def asked(self, below: Below, seen: RequestDigests) -> Sequence[Turn]:
        """Return the turns that asked exactly this at this place, oldest first.

        Sampling parameters do not count.
        """
        wanted = seen.system, seen.tools, seen.ask
        return [
            turn
            for turn in self.found.get(("asked", below, chained(seen.units)[-1]), ())
            if (turn.seen.system, turn.seen.tools, turn.seen.ask) == wanted
            and turn.seen.units == seen.units
        ]

    def requested(
        self, below: Below, chain: int, steps: Sequence[bytes], start: int, end: int
    ) -> Sequence[Turn]:
        """Return the turns whose new steps at this place are ``steps[start:end]``, oldest first.

        Their instructions and tools do not count. ``chain`` is the item of :func:`chained` for
        these steps.
        """
        turns = self.found.get(("asked", below, chain))
        if not turns:
            return ()
        wanted = tuple(steps[start:end])
        return [turn for turn in turns if turn.seen.units == wanted]

    def begun(self, below: Below, chain: int, seen: RequestDigests) -> Sequence[Turn]:
        """Return the turns that end with a user's text after the same new steps, oldest first.

        They have the instructions and tools of ``seen``. ``chain`` is the item of :func:`chained`
        for the steps before the text.
        """
        return self.found.get(("begun", below, chain, seen.system, seen.tools), ())

    def next_after(self, below: Below, step: bytes) -> Sequence[Turn]:
        """Return the turns whose requests go on with this step at this place, oldest first."""
        return self.found.get(("next", below, step), ())

    def deepest(self, seen: RequestDigests) -> int:
        """Return the number of steps of the longest known request.

        Only requests under the instructions and agent of ``seen`` count.
        """
        return self._deepest.get((seen.system, seen.agent), 0)

    def opened_within(self, text: str) -> Iterator[Turn]:
        """Yield the turns with a long reply whose opening stands in ``text``, each opening once.

        The cost grows with the length of the text, not with the number of turns.
        """
        for opening in openings(text):
            yield from self.found.get(("opening", opening), ())

    def echoed(self, turn: Turn) -> bool:
        """Return whether a later call was built on this one's reply."""
        return ("used", turn.call_id) in self.found

    def descends(self, turn: Turn, ancestor: Turn) -> bool:
        """Return whether ``turn`` lies below ``ancestor``, by base or by parent, or is it."""
        at: Turn | None = turn
        while at is not None:
            if at.call_id == ancestor.call_id:
                return True
            at = self.above(at)
        return False

    def above(self, turn: Turn) -> Turn | None:
        """Return the call that ``turn`` continues, by base or by parent."""
        return turn.base or self.turns.get(turn.parent_call_id or "")


def chained(steps: Iterable[bytes]) -> list[int]:
    """Return a hash of no step, of the first one, of the first two, and so on up to all.

    ``steps`` are the digests of the steps' meanings. The hashes hold in this process only.
    """
    return chained_on([0], steps)


def chained_on(chain: list[int], steps: Iterable[bytes]) -> list[int]:
    """Return the ``chain`` of the steps before ``steps``, with those of ``steps`` after it."""
    return chain[:-1] + list(accumulate(steps, _chain, initial=chain[-1]))


def _chain(before: int, step: bytes) -> int:
    return hash((before, step))


def _next_key(turn: Turn) -> Key:
    """Return the key of the place and the first new step of the turn's request."""
    seen, base = turn.seen, turn.base
    below = None if base is None else (base.call_id, turn.base_choice)
    return "next", below, seen.units[0] if seen.units else b""


def _keys(turn: Turn) -> dict[Key, None]:
    """Return the keys by which a request can recognise the turn, each once.

    They are the place and first new step of its request, all its new steps, the calls whose
    replies its request repeats, its replies, and the beginnings of long ones.
    """
    seen, base = turn.seen, turn.base
    below = None if base is None else (base.call_id, turn.base_choice)
    chain = chained(seen.units)
    keys: dict[Key, None] = {_next_key(turn): None, ("asked", below, chain[-1]): None}
    if turn.ending is not None and seen.units:
        keys["begun", below, chain[-2], seen.system, seen.tools] = None
    if turn.parent_call_id is not None:
        keys["used", turn.parent_call_id] = None
    if base is not None:
        keys["used", base.call_id] = None
    for reply in turn.choices:
        message = reply.message
        keys["reply", reply.digest] = None
        if message.tool_calls and message.content:
            keys["reply", calls_alone(message)] = None
        if isinstance(message.content, str) and len(message.content) < SUMMARY_LENGTH:
            continue
        for text in quotable(spoken_text(message)):
            keys["opening", text[:SUMMARY_LENGTH]] = None
    return keys


def calls_alone(message: Message) -> bytes:
    """Return the digest of a reply's tool calls alone.

    The calls stand alone because some harnesses drop the text beside them.
    """
    return digest_of(msgspec.structs.replace(message, content=None))


def summaries(turn: Turn) -> list[str]:
    """Return the texts of the turn's replies that a later conversation quotes.

    It quotes them if they are summaries.
    """
    return [text for choice in turn.choices for text in quotable(spoken_text(choice.message))]
