"""Session keys and the credentials that requests carry."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping
from typing import Final

SESSION_KEY_PREFIX: Final = "brk_"


def new_session_key() -> str:
    """A key with 256 random bits; only its hash is ever stored."""
    return SESSION_KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def same(given: str, expected: str) -> bool:
    """Equality in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


def credentials(headers: Mapping[str, str]) -> Iterator[str]:
    """Every key that the request carries, in any of the providers' three headers."""
    authorization = headers.get("authorization", "")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        value = headers.get(name, "").strip()
        if value:
            yield value
