"""One reply from a pool: the engine is chosen when the call leaves, and another is asked when it
fails before the first byte of its reply."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from bridle.proxy.engines.connections import ConnectionEpochOver
from bridle.proxy.engines.pool import EnginePool, PooledEngine, report
from bridle.proxy.engines.reply import EngineReply
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.engines.served_weights import other_weights
from bridle.proxy.engines.upstream import EngineStream, Sink
from bridle.proxy.wire.canonical import ApiError
from bridle.store.records import Note

_UNANSWERED: Final = frozenset({502, 503})
"""Refused, reset before the first byte, or the engine said so itself: nothing was generated."""
_ANSWERED: Final = frozenset({400, 404, 413, 422, 429})
"""The engine is well, it only says no."""
_PAUSES_S: Final = (0.05, 0.2, 0.8)
"""Before the same engine is asked again."""


class PooledReply:
    """The face of :class:`bridle.proxy.engines.upstream.EngineStream`, over a pool."""

    def __init__(
        self,
        pool: EnginePool,
        request: EngineRequest,
        reply: EngineReply,
        call_id: str,
        session_id: str,
        notes: list[Note],
        *,
        retries: int,
    ) -> None:
        """Each retry is put into ``notes``."""
        self._pool = pool
        self._request = request
        self._reply = reply
        self._call_id = call_id
        self._session_id = session_id
        self._notes = notes
        self._retries = retries
        self._engine: PooledEngine | None = None
        self._stream: EngineStream | None = None
        self._asked_of: int | None = None
        """The engine's version when it was asked. A reply that comes whole is stamped with that of
        its arrival: which of its tokens are older, only a stream tells."""

    async def open(self) -> PooledEngine:
        """Sends the request; returns the engine that took it. Raises :class:`ApiError`."""
        tried: list[PooledEngine] = []
        while True:
            engine = self._pool.choose(self._session_id, tried)
            if engine in tried:
                await asyncio.sleep(_PAUSES_S[min(len(tried), len(_PAUSES_S)) - 1])
            try:
                await self._ask(engine)
                return engine
            except ApiError as error:
                tried.append(engine)
                if not self._may_retry(error, tried):
                    raise
                engine.retries += 1
                self._notes.append(Note("upstream_retry", f"{engine.name} {error.kind}"))

    async def follow(self, sink: Sink) -> None:
        """See :meth:`proxy.upstream.EngineStream.follow`."""
        stream, engine = self._stream, self._engine
        assert stream is not None, "open() first"  # noqa: S101 - a programming error
        assert engine is not None, "open() first"  # noqa: S101
        before = engine.circuit.state
        try:
            await stream.follow(sink)
            engine.circuit.succeeded()
            if not self._request.stream and engine.version != self._asked_of:
                versions = f"{self._asked_of} {engine.version}"
                self._notes.append(Note("version_changed_midway", versions))
        except ApiError as error:
            if _is_failure(error):
                engine.circuit.failed()
                report(engine, before)
            raise

    def close(self) -> None:
        """See :meth:`proxy.upstream.EngineStream.close`."""
        if self._stream is not None:
            self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        self._leave()

    async def _ask(self, engine: PooledEngine) -> None:
        before = engine.circuit.state
        self._stream = engine.upstream.reply(self._request, self._reply, self._call_id)
        self._engine = engine
        self._asked_of = engine.version
        engine.enter()
        trial = engine.circuit.begin()
        try:
            await self._open(engine, self._stream)
            engine.circuit.answered()
        except ApiError as error:
            if error.status in _ANSWERED:
                engine.circuit.answered()
                engine.circuit.succeeded()
            elif _is_failure(error) and not engine.serves.changed:
                engine.circuit.failed(trial)
            else:
                engine.circuit.abandoned(trial)
            self._stream.close()
            self._leave()
            raise
        except BaseException:
            engine.circuit.abandoned(trial)
            raise
        finally:
            report(engine, before)

    async def _open(self, engine: PooledEngine, stream: EngineStream) -> None:
        """Sends the request to an engine that is known to serve what was published to it."""
        try:
            await stream.open(engine.serves.connection_epoch)
        except ConnectionEpochOver:
            await engine.serves.compare()
            if engine.serves.changed:
                raise other_weights(engine.version) from None
            await stream.open()

    def _leave(self) -> None:
        if self._engine is not None:
            self._engine.leave()
            self._engine = None

    def _may_retry(self, error: ApiError, tried: list[PooledEngine]) -> bool:
        """An engine that asked for patience is not asked again, but another may be."""
        if error.status not in _UNANSWERED or len(tried) > self._retries:
            return False
        usable = self._pool.usable_engines()
        others = [engine for engine in usable if engine not in tried]
        return bool(others or (usable and error.retry_after is None))


def _is_failure(error: ApiError) -> bool:
    """Whether ``error`` speaks against the engine and not against the request."""
    return error.status in _UNANSWERED or error.kind == "upstream_timeout"
