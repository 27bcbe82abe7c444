"""Session keys, and how they are compared."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

SESSION_KEY_PREFIX: Final = "brk_"


def new_session_key() -> str:
    """A key with 256 random bits; only its hash is ever stored."""
    return SESSION_KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def same(given: str, expected: str) -> bool:
    """Equality, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())
