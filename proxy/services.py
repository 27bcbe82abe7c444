"""The objects that all calls of one proxy share, and their start and stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.errors import BridleError, UsageError
from bridle.extras import missing_extra
from bridle.proxy.deployment import Deployment
from bridle.proxy.dialects.dialect import Dialect, Provider, StoredReplies
from bridle.proxy.dialects.registry import providers
from bridle.proxy.engines.beside import BesideChat
from bridle.proxy.engines.models import ModelRoutes
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.rendering import PoolTemplate
from bridle.proxy.http.watch import Watch
from bridle.proxy.recording.call_warnings import CallWarnings
from bridle.proxy.recording.metrics import Metrics
from bridle.proxy.recording.recorder import Recorder
from bridle.proxy.replay.replays import Replays
from bridle.proxy.session.idle_seal import IdleSeal
from bridle.proxy.session.memory import SessionMemory
from bridle.proxy.session.registry import Sessions
from bridle.proxy.session.rules import Budgets
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.in_flight import InFlight
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY
from bridle.store.schema.database import migrate
from bridle.store.writing.redaction import DetectorsMissing, Redactor
from bridle.store.writing.vocabularies import keep_vocabulary
from bridle.store.writing.writer import Writer

if TYPE_CHECKING:
    from bridle.engine.contract.tokenizer import Tokenizer
    from bridle.proxy.continuation.continuation import Continuer
    from bridle.proxy.recording.tracing import Tracing


class CannotStart(BridleError):
    """The settings need something that is missing here; the message names it."""


@dataclass(frozen=True, slots=True)
class Services:
    """Created by :meth:`start` inside the serving event loop; released by :meth:`close`."""

    started_at: float
    """Seconds since 1970."""
    settings: ProxySettings
    writer: Writer
    reader: Reader
    feed_readers: tuple[Reader, ...]
    """The readers of the further stores of the feed."""
    models: ModelRoutes
    beside: BesideChat
    budgets: Budgets
    in_flight: InFlight
    sessions: Sessions
    memory: SessionMemory
    replays: Replays
    metrics: Metrics
    recorder: Recorder
    templates: Mapping[EnginePool, PoolTemplate]
    """The template of each pool's model."""
    providers: tuple[Provider, ...]
    """The providers of the dialects that are served."""
    stored: Mapping[str, StoredReplies]
    """The recorded replies to which clients refer, by the name of their dialect."""
    watch: Watch
    deployment: Deployment
    idle_seal: IdleSeal
    tracing: Tracing | None
    call_warnings: CallWarnings

    @property
    def engines(self) -> EnginePool:
        return self.models.policies[DEFAULT_POLICY]

    @classmethod
    async def start(cls, settings: ProxySettings, dialects: Sequence[Dialect]) -> Services:
        """Open the store (creating or migrating it) and the engine's connections.

        Raise :class:`CannotStart`, before anything is opened.
        """
        continuer = await asyncio.to_thread(_continuer, settings)
        tracing = await asyncio.to_thread(_tracing, dialects) if settings.tracing else None
        try:
            models = ModelRoutes(settings, dialects)
        except UsageError as error:
            raise CannotStart(str(error)) from error
        writer = await asyncio.to_thread(_open_store, settings)
        reader = Reader(settings.store_url)
        gates = {name: pool.gate for name, pool in models.policies.items()}
        metrics = Metrics(gates, labelled=settings.workers)
        memory = SessionMemory(
            reader, settings.limits.memory_bytes, on_read=metrics.sessions_read.inc
        )
        await memory.start()
        tokenizer = None if continuer is None else continuer.tokenizer
        vocabulary = await asyncio.to_thread(_vocabulary, settings, tokenizer)
        await models.start()
        metrics.watch(models.states)
        watch = Watch(settings.limits.keep_alive_s)
        watch.start()
        spoken = providers(dialects)
        key_headers = [one.key_header for one in spoken if one.key_header is not None]
        deployment = Deployment(settings, models.policies, writer, reader)
        await deployment.start()
        sessions = Sessions(
            *(settings, writer, reader, memory),
            is_sealed=deployment.is_sealed,
            is_named=deployment.is_named,
            key_headers=key_headers,
            vocabulary=vocabulary,
        )
        idle_seal = IdleSeal(reader, sessions.seal, settings.seal_idle_s)
        idle_seal.start()
        call_warnings = CallWarnings()
        call_warnings.start()
        return cls(
            started_at=time.time(),
            settings=settings,
            writer=writer,
            reader=reader,
            feed_readers=tuple(map(Reader, settings.feed_stores)),
            models=models,
            beside=BesideChat(settings),
            budgets=Budgets(reader, settings.budget),
            in_flight=InFlight(settings.limits.in_flight_bytes),
            sessions=sessions,
            memory=memory,
            replays=Replays(reader),
            metrics=metrics,
            recorder=Recorder(
                writer,
                memory,
                metrics,
                [call_warnings.observe, *([] if tracing is None else [tracing.observe])],
                vocabulary=None if tokenizer is None else tokenizer.vocabulary_size,
            ),
            templates={pool: PoolTemplate(pool, continuer) for pool in models.pools()},
            providers=spoken,
            stored={one.name: one.stored(reader) for one in dialects if one.stored is not None},
            watch=watch,
            deployment=deployment,
            idle_seal=idle_seal,
            tracing=tracing,
            call_warnings=call_warnings,
        )

    async def close(self) -> None:
        """Stop everything that :meth:`start` started, and write queued records."""
        await self.idle_seal.close()
        await self.deployment.close()
        await self.watch.close()
        await self.models.close()
        await self.beside.close()
        await self.call_warnings.close()
        await asyncio.to_thread(self.writer.close)
        for reader in (self.reader, *self.feed_readers):
            reader.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def _tracing(dialects: Iterable[Dialect]) -> Tracing:
    """Start tracing. The import is here because the packages belong to an extra."""
    try:
        from bridle.proxy.recording.tracing import Tracing
    except ImportError as error:
        message = missing_extra("traces need the extra otel", "otel", error)
        raise CannotStart(message) from error
    return Tracing({dialect.name: dialect for dialect in dialects})


def _open_store(settings: ProxySettings) -> Writer:
    try:
        redactor = Redactor() if settings.redact else None
    except DetectorsMissing as error:
        raise CannotStart(str(error)) from error
    migrate(settings.store_url)
    return Writer(
        settings.store_url,
        synchronous=settings.synchronous,
        cache_bytes=settings.limits.memory_bytes // 2,
        patience=settings.limits.store_patience_s,
        redactor=redactor,
    ).start()


def _vocabulary(settings: ProxySettings, tokenizer: Tokenizer | None) -> str | None:
    """Keep the texts of the tokenizer's tokens in the store; return the name that they have there.

    Without a tokenizer there is none.
    """
    if tokenizer is None:
        return None
    return keep_vocabulary(settings.store_url, tokenizer.vocabulary())


def _continuer(settings: ProxySettings) -> Continuer | None:
    """Return the continuer, or ``None`` without a tokenizer.

    The model's template is probed, which takes a moment. The imports are here because a proxy
    without a tokenizer needs neither the tokenizers nor the template engine.
    """
    if settings.tokenizer_dir is None:
        return None
    from bridle.engine.contract.tokenizer import Tokenizer, TokenizerNotRead
    from bridle.proxy.continuation.continuation import Continuer

    try:
        return Continuer(Tokenizer(settings.tokenizer_dir))
    except TokenizerNotRead as error:
        raise CannotStart(str(error)) from error
