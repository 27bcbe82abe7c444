"""What one engine was said to serve, and whether it still says so itself.

An engine's *fingerprint* is what it tells of the weights that it serves: our own engines a digest
of them, vLLM the version that it was stamped with. What it tells when a policy version is published
belongs to that version. An engine that later tells another fingerprint, or none any more, has got
other weights behind the proxy's back, mostly by a restart: its tokens would be stamped with a
version that is not theirs. It is left out until it is published to again, or tells the fingerprint
again.

An engine that tells no fingerprint is believed, and one that nobody has published to is not asked.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from bridle.proxy.engines.upstream import Upstream
from bridle.proxy.wire.canonical import ApiError

log = logging.getLogger("bridle.proxy")

_PUBLISHING_S: Final = 5.0
"""Whoever publishes waits for the fingerprint, most often with the engine paused."""
_CHECKING_S: Final = 15.0


class ServedWeights:
    """Policy version and fingerprint of one engine."""

    def __init__(self, upstream: Upstream, name: str, version: int) -> None:
        self.version = version
        """As it was last published."""
        self.fingerprint: str | None = None
        """What belongs to the version; ``None``: nothing is known that could be compared."""
        self.changed = False
        """When last asked, the engine told another fingerprint."""
        self.changes = 0
        """How often that was found anew."""
        self._upstream = upstream
        self._name = name
        self._before: str | None = None
        """The fingerprint before the version was published once more."""
        self.publishes = 0
        """Tells the last of them from those that it has overtaken."""
        self._proven = 0
        """The epoch of connections in which the engine told the fingerprint."""

    @property
    def connection_epoch(self) -> int | None:
        """The epoch of connections in which calls may go to the engine without asking it first;
        ``None``: any."""
        return None if self.fingerprint is None else self._proven

    def published(self, version: int, fingerprint: str | None = None) -> None:
        """The engine serves ``version``; ``fingerprint`` as somebody has asked for it."""
        self._before = self.fingerprint if version == self.version else None
        self.version, self.fingerprint = version, fingerprint
        self.changed = False
        self.publishes += 1
        self._proven = 0

    async def learn(self) -> str | None:
        """The fingerprint of what was just published, as the engine reports it. When the engine
        does not answer, the fingerprint of the same version is kept; another version has none."""
        publishes = self.publishes
        try:
            fingerprint, proven = await self._told(_PUBLISHING_S)
        except ApiError as error:
            extra = {"engine": self._name, "version": self.version, "error": error.message}
            log.warning("engine_mark_unread", extra=extra)
            fingerprint, proven = self._before, 0
        if publishes == self.publishes:
            self.fingerprint, self._proven = fingerprint, proven
        return fingerprint

    async def compare(self) -> None:
        """Asks the engine whether it still serves what was published.

        Raises :class:`ApiError` when that cannot be read, and decides nothing then.
        """
        if self.fingerprint is None:
            return
        publishes = self.publishes
        fingerprint, proven = await self._told(_CHECKING_S)
        if publishes != self.publishes:
            return  # What was told is of the weights before.
        changed = fingerprint != self.fingerprint
        self._proven = 0 if changed else proven
        if changed is self.changed:
            return
        self.changed = changed
        extra = {"engine": self._name, "version": self.version}
        if changed:
            self.changes += 1
            log.warning(
                "engine_changed",
                extra={**extra, "told": fingerprint, "published": self.fingerprint},
            )
        else:
            log.info("engine_recognised", extra=extra)

    async def _told(self, timeout_s: float) -> tuple[str | None, int]:
        """The engine's fingerprint, and the connection_epoch of connections that it holds for."""
        try:
            async with asyncio.timeout(timeout_s):
                fingerprint = await self._upstream.fingerprint()
        except TimeoutError as error:
            told = "the engine did not tell its weights in time"
            raise ApiError("upstream_timeout", told, status=504) from error
        return fingerprint, self._upstream.connection_epoch


def other_weights(version: int) -> ApiError:
    """Why no call may go to an engine that has changed."""
    told = f"the engine has been restarted with other weights than policy version {version}"
    return ApiError("overloaded", told, status=503, retry_after=1.0)
