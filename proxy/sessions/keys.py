"""The proxy's keys, and how they are compared.

A session key records calls of its session. A verifier key scores and seals one session and does
nothing else. The admin key permits everything.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Final

SESSION_KEY_PREFIX: Final = "brk_"
VERIFIER_KEY_PREFIX: Final = "brv_"


def new_session_key() -> str:
    """A key with 256 random bits; only its hash is ever stored."""
    return SESSION_KEY_PREFIX + secrets.token_urlsafe(32)


def verifier_key(admin_key: str | None, session_id: str) -> str:
    """The key that scores the session: its id and a proof that the admin key's holder made it.

    Every process with the admin key can check it, so it is stored nowhere; a new admin key ends
    it. Without an admin key the control routes are open, and it permits nothing more.
    """
    proof = hmac.digest((admin_key or "").encode(), session_id.encode(), "sha256")
    text = base64.urlsafe_b64encode(proof).decode().rstrip("=")
    return f"{VERIFIER_KEY_PREFIX}{session_id}.{text}"


def session_of(key: str, admin_key: str | None) -> str | None:
    """The session that a verifier key scores; ``None`` for a key that is not ours."""
    session_id = key.removeprefix(VERIFIER_KEY_PREFIX).rpartition(".")[0]
    return session_id if same(key, verifier_key(admin_key, session_id)) else None


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def same(given: str, expected: str) -> bool:
    """Equality, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())
