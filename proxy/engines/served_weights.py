"""Which policy version was published to an engine, and whether it still serves those weights.

An engine reports a *fingerprint* of the weights that it serves: our own engines a digest of them,
vLLM the version that it was stamped with. The fingerprint that it reports when a policy version is
published belongs to that version. An engine that later reports another fingerprint, or none any
more, has got other weights without a publish, mostly by a restart: its tokens would be stamped with
a version that is not theirs. It gets no calls until a version is published to it again, or it
reports the fingerprint again.

An engine that reports no fingerprint is trusted, and one that was never published to is not asked.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from bridle.proxy.engines.endpoint import EngineEndpoint
from bridle.proxy.wire.canonical import ApiError

log = logging.getLogger("bridle.proxy")

_PUBLISHING_S: Final = 5.0
"""A publish waits for the fingerprint, most often with the engine paused."""
_CHECKING_S: Final = 15.0


class ServedWeights:
    """Policy version and fingerprint of one engine."""

    def __init__(self, endpoint: EngineEndpoint, name: str, version: int) -> None:
        self.version = version
        """As it was last published."""
        self.fingerprint: str | None = None
        """Of the version's weights; ``None``: there is nothing to compare with."""
        self.changed = False
        """When last asked, the engine reported another fingerprint."""
        self.changes = 0
        """How often that was found anew."""
        self._endpoint = endpoint
        self._name = name
        self._before: str | None = None
        """The fingerprint before the version was published once more."""
        self.publishes = 0
        """Distinguishes the last of them from those that it has overtaken."""
        self.connection_epoch: int | None = None
        """The epoch of connections in which the engine reported the fingerprint: calls within it
        may go to the engine without asking it first; ``None``: any call may."""

    def _settle(self, fingerprint: str | None, proven: int) -> None:
        self.fingerprint = fingerprint
        self.connection_epoch = None if fingerprint is None else proven

    def published(self, version: int, fingerprint: str | None = None) -> None:
        """The engine serves ``version``; ``fingerprint`` as somebody has asked for it."""
        self._before = self.fingerprint if version == self.version else None
        self.version = version
        self.changed = False
        self.publishes += 1
        self._settle(fingerprint, 0)

    async def learn(self) -> str | None:
        """The fingerprint of what was just published, as the engine reports it. When the engine
        does not answer, the fingerprint of the same version is kept; another version has none."""
        publishes = self.publishes
        try:
            fingerprint, proven = await self._reported(_PUBLISHING_S)
        except ApiError as error:
            extra = {"engine": self._name, "version": self.version, "error": error.message}
            log.warning("engine_mark_unread", extra=extra)
            fingerprint, proven = self._before, 0
        if publishes == self.publishes:
            self._settle(fingerprint, proven)
        return fingerprint

    async def compare(self) -> None:
        """Asks the engine whether it still serves what was published.

        Raises :class:`ApiError` when that cannot be read, and decides nothing then.
        """
        if self.fingerprint is None:
            return
        publishes = self.publishes
        fingerprint, proven = await self._reported(_CHECKING_S)
        if publishes != self.publishes:
            return  # The answer is about the weights before.
        changed = fingerprint != self.fingerprint
        self.connection_epoch = 0 if changed else proven
        if changed is self.changed:
            return
        self.changed = changed
        extra = {"engine": self._name, "version": self.version}
        if changed:
            self.changes += 1
            log.warning(
                "engine_changed",
                extra={**extra, "reported": fingerprint, "published": self.fingerprint},
            )
        else:
            log.info("engine_recognised", extra=extra)

    async def _reported(self, timeout_s: float) -> tuple[str | None, int]:
        """The engine's fingerprint, and the epoch of connections in which it was read."""
        try:
            async with asyncio.timeout(timeout_s):
                fingerprint = await self._endpoint.fingerprint()
        except TimeoutError as error:
            message = "the engine did not report its weights in time"
            raise ApiError("upstream_timeout", message, status=504) from error
        return fingerprint, self._endpoint.transport.connection_epoch


def other_weights(version: int) -> ApiError:
    """Why no call may go to an engine that has changed."""
    message = f"the engine has been restarted with other weights than policy version {version}"
    return ApiError("overloaded", message, status=503, retry_after=1.0)
