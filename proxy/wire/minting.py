"""The call id in the opaque values that a reply carried and a harness echoed.

Every value of :class:`bridle.proxy.wire.canonical.Minted` contains the 24 base-32 characters of its
call id, followed by an index of two or more digits (response ids have none), between characters
that cannot be part of either. Harnesses join such values (``call_…|fc_…``) or prefix them with a
tool's name, so the last such characters count. Google's clients require base 64 for signatures. The
call id can be read from all of these.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode, urlsafe_b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable
from dataclasses import dataclass

_MINTED = re.compile(r"(?<![A-Za-z0-9])([a-z2-7]{24})(\d{2,6})?(?![A-Za-z0-9])")
_LONGEST_ECHO = 512
"""Maximum characters of a value that is searched. Minted values are short; a long foreign signature
or item is not searched."""


@dataclass(frozen=True, slots=True)
class MintedId:
    """The origin of an echoed value."""

    call_id: str
    index: int | None
    """Position of the tool call or output item within the reply; ``None`` for a response id."""


def read(value: str) -> MintedId | None:
    """Return the call that minted ``value``.

    Return ``None`` if it does not have the shape of a minted value.

    The shape is no proof: the caller must check that the call exists.
    """
    if len(value) > _LONGEST_ECHO:
        return None
    found = _MINTED.findall(value)
    if not found:
        plain = _plain(value)
        found = _MINTED.findall(plain) if plain is not None else []
    if not found:
        return None
    characters, index = found[-1]
    return MintedId(f"call_{characters}", int(index) if index else None)


def call_id_of(value: str) -> str | None:
    """Return the call id in a minted value, or ``None``."""
    minted = read(value)
    return minted.call_id if minted is not None else None


def call_ids(values: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct call ids in ``values``, in order of first appearance."""
    return tuple(dict.fromkeys(minted.call_id for value in values if (minted := read(value))))


def as_base64(value: str) -> str:
    """Return a minted value for clients that decode the field as bytes.

    Google's thought signatures are such a field.
    """
    return b64encode(value.encode()).decode()


def _plain(value: str) -> str | None:
    """Return ``value`` decoded from either alphabet of base 64, if it is such text."""
    try:
        if "-" in value or "_" in value:
            return urlsafe_b64decode(value).decode()
        return b64decode(value, validate=True).decode()
    except (Base64Error, ValueError):
        return None
