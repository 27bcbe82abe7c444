"""The weights that an engine serves, the check that they are those published, and its sampling.

An engine reports a *fingerprint* of the weights that it serves: our own engines a digest of them,
vLLM the version that it was stamped with. The fingerprint that it reports when a policy version is
published belongs to that version. If it later reports another fingerprint, or none any more, it has
got other weights without a publish, mostly by a restart, and its tokens would be stamped with a
version that is not theirs. It gets no calls until a version is published to it again, or it reports
the fingerprint again.

An engine that reports no fingerprint is trusted. An engine that was never published to is not
asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, Self

import msgspec

from bridle.engine.contract.contract import NEUTRAL_DEFAULTS, PROCESSED_LOGPROBS
from bridle.proxy.wire.canonical import ApiError
from bridle.store.operations.gates import Served
from bridle.store.records import LogprobsOf

log = logging.getLogger("bridle.proxy")

_PUBLISHING_S: Final = 5.0
"""Seconds that a publish waits for the fingerprint, most often with the engine paused."""
_CHECKING_S: Final = 15.0
_MODES: Final[dict[str, LogprobsOf]] = {PROCESSED_LOGPROBS: "processed", "raw_logprobs": "raw"}


Read = Callable[[], Awaitable[tuple[str | None, int]]]
"""Asks an engine for its fingerprint. Returns it with the connection epoch in which it was read."""


class ServedWeights:
    """The policy version and the fingerprint of one engine."""

    def __init__(self, name: str, read: Read, version: int) -> None:
        self.version = version
        """The version that was published last."""
        self.fingerprint: str | None = None
        """The fingerprint of the version's weights; ``None`` if there is nothing to compare
        with."""
        self.changed = False
        """True if the engine reported another fingerprint when it was last asked."""
        self.changes = 0
        """Number of times that ``changed`` became true."""
        self._name = name
        self._read = read
        self._before: str | None = None
        """The fingerprint before the version was published once more."""
        self.publishes = 0
        """Number of publishes; it distinguishes the last one from those that it has overtaken."""
        self._published_in = -1
        """The revision of the last publish."""
        self.connection_epoch: int | None = None
        """The connection epoch in which the engine reported the fingerprint: calls within it may go
        to the engine without asking it first. ``None`` if any call may."""

    def _settle(self, fingerprint: str | None, proven: int) -> None:
        self.fingerprint = fingerprint
        self.connection_epoch = None if fingerprint is None else proven

    def published(self, version: int, fingerprint: str | None = None) -> None:
        """Record that the engine serves ``version``.

        ``fingerprint`` is the one that it has already reported for it, if it was asked.
        """
        self._before = self.fingerprint if version == self.version else None
        self.version = version
        self.changed = False
        self.publishes += 1
        self._settle(fingerprint, 0)

    def set_row(self, row: Served) -> None:
        """Set the state that the engine's row in the store has.

        It is a new publish, or the fingerprint that another process has read from the engine.
        """
        read_elsewhere = row.weights_fingerprint not in (None, self.fingerprint)
        if row.published != self._published_in or read_elsewhere:
            self._published_in = row.published
            self.published(row.version, row.weights_fingerprint)

    async def learn(self) -> str | None:
        """Ask the engine for the fingerprint of the weights just published, and return it.

        If the engine does not answer, the fingerprint of the same version is kept; another version
        has none.
        """
        publishes = self.publishes
        try:
            fingerprint, proven = await self._reported(_PUBLISHING_S)
        except ApiError as error:
            extra = {"engine": self._name, "version": self.version, "error": error.message}
            log.warning("weights_fingerprint_unread", extra=extra)
            fingerprint, proven = self._before, 0
        if publishes == self.publishes:
            self._settle(fingerprint, proven)
        return fingerprint

    async def compare(self) -> None:
        """Ask the engine whether it still serves the published weights.

        Raises :class:`ApiError` if its report cannot be read; nothing is decided then.
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
        """Return the engine's fingerprint and the connection epoch in which it was read."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read()
        except TimeoutError as error:
            message = "the engine did not report its weights in time"
            raise ApiError("upstream_timeout", message, status=504) from error


def other_weights(version: int) -> ApiError:
    """Return the error for calls to an engine whose weights have changed."""
    message = f"the engine has been restarted with other weights than policy version {version}"
    return ApiError("overloaded", message, status=503, retry_after=1.0)


Constrained = Literal["none", "answer", "reply"]
"""The part of a reply that an engine's grammars constrain. ``answer`` is the part that follows the
reasoning."""


class EngineSampling(msgspec.Struct, frozen=True, gc=False):
    """An engine's own sampling, without the parameters of requests."""

    logprobs: LogprobsOf
    neutral: bool
    """True if a request that names no parameters gets the policy's own distribution."""
    grammars: Constrained = "reply"
    """The part of a reply that a grammar constrains; ``none`` for an engine without grammars."""

    @classmethod
    def reported(cls, report: Any, structured: Any = None) -> Self | None:
        """Read the sampling from an engine's JSON, and from vLLM's about structured outputs.

        Return ``None`` if the engine does not report it.
        """
        mode = report.get("logprobs_mode") if isinstance(report, dict) else None
        if not isinstance(mode, str):
            return None
        neutral = report.get("generation_config") == NEUTRAL_DEFAULTS
        grammars: Constrained = "none" if report.get("grammars") is False else "reply"
        if isinstance(structured, dict) and structured.get("reasoning_parser"):
            # vLLM lets the reasoning run free, unless it is told otherwise.
            grammars = "answer" if structured.get("enable_in_reasoning") is False else "reply"
        return cls(_MODES.get(mode, "unknown"), neutral, grammars)


UNKNOWN: Final = EngineSampling("unknown", neutral=False)
