"""The proxy's keys, and how they are compared.

A session key records calls of its session. A verifier key scores and seals one session and does
nothing else. The admin key permits everything.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

SESSION_KEY_PREFIX: Final = "brk_"
VERIFIER_KEY_PREFIX: Final = "brv_"


def new_session_key() -> str:
    """Return a key with 256 random bits; only its hash is ever stored."""
    return SESSION_KEY_PREFIX + secrets.token_urlsafe(32)


def new_verifier_key(session_id: str) -> str:
    """Return a key that scores the session: its id, and 256 random bits.

    Only its hash is stored, so the key can be made from neither the admin key nor the store.
    """
    return f"{VERIFIER_KEY_PREFIX}{session_id}.{secrets.token_urlsafe(32)}"


def session_named_in(key: str) -> str:
    """Return the id of the session that a verifier key claims to score."""
    return key.removeprefix(VERIFIER_KEY_PREFIX).rpartition(".")[0]


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def same(given: str, expected: str) -> bool:
    """Compare two keys in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())
