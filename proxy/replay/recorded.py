"""The calls of a recorded session, as a new session re-enters them.

All minted values of a call contain the 24 characters of its id (``proxy/wire/minting.py``). The
recorded bytes become those of the new session when these characters are replaced, in whichever
dialect they are.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from msgspec import structs

from bridle.store.call import CallRow
from bridle.store.reading.queries import Reader
from bridle.store.records import CallKind, CallStatus, Message, TokenIds
from bridle.store.tree import TokenTree, path_ids

_CHARACTERS: Final = re.compile(rb"(?<![A-Za-z0-9])[a-z2-7]{24}(?=\d{0,6}(?![A-Za-z0-9]))")
_SIGNATURES: Final = re.compile(rb"YnJpZGxlL[A-Za-z0-9+/_-]{35}")
"""Base 64 of ``bridle.``, 24 characters and two digits."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A complete call of the origin."""

    row: CallRow
    turn: int
    """Number of the call in its session, from 1, as in ``bridle show``."""
    echoes: frozenset[str]
    """Ids of the calls whose minted values its request contains."""
    prompt: TokenIds | None
    """Ids of its prompt, ``uint32[P]``, if the engine reported them."""
    reply: TokenIds | None
    """Ids of its first reply, ``uint32[T]``, if the engine reported them."""

    @property
    def id(self) -> str:
        return self.row.id


class RecordedSession:
    """The calls of a recorded session that can be replayed."""

    def __init__(self, reader: Reader, calls: Sequence[RecordedCall]) -> None:
        self.calls = calls
        self.by_id = {call.id: call for call in calls}
        self._reader = reader

    @classmethod
    def load(cls, reader: Reader, session_id: str) -> Self:
        """Load the complete calls of a session, without those that only count tokens.

        This reads the store. Raise ``ValueError`` if the record is damaged.
        """
        rows = reader.calls(session_id)
        tree = TokenTree(session_id, reader.spans(session_id))
        known = {row.id for row in rows}
        found: list[RecordedCall] = []
        for turn, row in enumerate(rows, 1):
            if row.status is not CallStatus.COMPLETE or row.kind is CallKind.COUNT:
                continue
            echoes = echoed(reader.request_body(row.id)) & known
            found.append(RecordedCall(row, turn, echoes, *_tokens(tree, row)))
        return cls(reader, found)

    def request(self, call: RecordedCall, names: Mapping[str, str]) -> bytes:
        """Return the bytes of a recorded request with other call ids. This reads the store."""
        return renamed(self._reader.request_body(call.id), names)

    def response(self, call: RecordedCall, names: Mapping[str, str]) -> bytes:
        """Return the bytes of a recorded reply with other call ids. This reads the store."""
        return renamed(self._reader.response_body(call.id), names)


def echoed(body: bytes) -> frozenset[str]:
    """Return the ids of all calls whose minted values may be in ``body``."""
    found = set(_CHARACTERS.findall(body))
    for signature in _SIGNATURES.findall(body):
        found.update(_CHARACTERS.findall(_decoded(signature)))
    return frozenset(f"call_{characters.decode()}" for characters in found)


def renamed(body: bytes, names: Mapping[str, str]) -> bytes:
    """Return ``body`` with the ids of calls in its minted values replaced.

    ``names`` has the new id of each call.
    """
    new = {_characters(old): _characters(name) for old, name in names.items()}

    def plain(match: re.Match[bytes]) -> bytes:
        return new.get(match[0], match[0])

    def signature(match: re.Match[bytes]) -> bytes:
        return _encoder(match[0])(_CHARACTERS.sub(plain, _decoded(match[0])))

    return _SIGNATURES.sub(signature, _CHARACTERS.sub(plain, body))


def renamed_replies(call: RecordedCall, names: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the recorded replies with the tool-call ids of other calls."""

    def own(value: str) -> str:
        return renamed(value.encode(), names).decode()

    return tuple(
        structs.replace(
            message,
            tool_calls=tuple(structs.replace(one, id=own(one.id)) for one in message.tool_calls),
        )
        for message in call.row.replies
    )


def _tokens(tree: TokenTree, row: CallRow) -> tuple[TokenIds | None, TokenIds | None]:
    end = tree.nodes.get(row.prompt_span_id)
    if row.prompt_tokens is None or end is None:
        return None, None
    prompt = path_ids(end, row.prompt_tokens)
    tip = tree.nodes.get(f"{row.id}.o" if row.replayed_call_id else f"{row.id}.s0")
    if tip is None:
        return prompt, None
    return prompt, path_ids(tip, tip.end, first=row.prompt_tokens)


def _characters(call_id: str) -> bytes:
    return call_id.removeprefix("call_").encode()


def _decoded(signature: bytes) -> bytes:
    return urlsafe_b64decode(signature) if _is_urlsafe(signature) else b64decode(signature)


def _encoder(signature: bytes) -> Callable[[bytes], bytes]:
    return urlsafe_b64encode if _is_urlsafe(signature) else b64encode


def _is_urlsafe(signature: bytes) -> bool:
    return b"-" in signature or b"_" in signature
