"""Everything that the calls of one proxy share, and its start and stop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.tokenizer import Tokenizer
from proxy.continuation import Continuer
from proxy.conversations import SessionConversations
from proxy.cut_ids import PromptIds
from proxy.engine_pool import EnginePool
from proxy.keep_alive import KeepAlives
from proxy.metrics import Metrics
from proxy.policy_gate import PolicyGate
from proxy.recorder import Recorder
from proxy.sessions import Sessions
from proxy.settings import ProxySettings
from proxy.stored_responses import StoredResponses
from store.database import migrate
from store.queries import Reader
from store.redaction import Redactor
from store.writer import Writer


@dataclass(frozen=True, slots=True)
class Services:
    """Made by :meth:`start` inside the event loop that serves; given back by :meth:`close`."""

    settings: ProxySettings
    writer: Writer
    reader: Reader
    engines: EnginePool
    sessions: Sessions
    conversations: SessionConversations
    gate: PolicyGate
    metrics: Metrics
    recorder: Recorder
    continuer: Continuer | None
    """Makes exact prompts; ``None`` without the model's tokenizer."""
    stored_responses: StoredResponses
    keep_alives: KeepAlives
    prompt_ids: PromptIds
    """Long prompts as the engine told them last, by session."""

    @classmethod
    async def start(cls, settings: ProxySettings) -> Services:
        """Opens the store (creating or migrating it) and the engine's connections."""
        writer = await asyncio.to_thread(_open_store, settings)
        reader = Reader(settings.store_url)
        gate = PolicyGate()
        metrics = Metrics(gate)
        continuer = await asyncio.to_thread(_continuer, settings)
        conversations = SessionConversations(reader, settings.limits.sessions_in_memory)
        await conversations.start()
        engines = EnginePool(
            settings,
            gate,
            settings.engine_urls,
            model=settings.model,
            api_key=settings.upstream_api_key,
        )
        await engines.start()
        metrics.watch(engines.states)
        keep_alives = KeepAlives(settings.limits.keep_alive_s)
        keep_alives.start()
        return cls(
            settings=settings,
            writer=writer,
            reader=reader,
            engines=engines,
            sessions=Sessions(settings, writer, reader, conversations.opened),
            conversations=conversations,
            gate=gate,
            metrics=metrics,
            recorder=Recorder(writer, conversations, gate, metrics, continuer),
            continuer=continuer,
            stored_responses=StoredResponses(reader),
            keep_alives=keep_alives,
            prompt_ids=PromptIds(),
        )

    async def close(self) -> None:
        """Stops what :meth:`start` started; queued records are written first."""
        await self.keep_alives.close()
        await self.engines.close()
        await asyncio.to_thread(self.writer.close)
        self.reader.close()


def _open_store(settings: ProxySettings) -> Writer:
    migrate(settings.store_url)
    redactor = Redactor() if settings.redact else None
    return Writer(settings.store_url, synchronous=settings.synchronous, redactor=redactor).start()


def _continuer(settings: ProxySettings) -> Continuer | None:
    """Probes the model's template, which takes a moment."""
    if settings.tokenizer_dir is None:
        return None
    return Continuer(Tokenizer(settings.tokenizer_dir))
