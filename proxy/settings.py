"""What one proxy is told at start-up, as one immutable value."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bridle.store.records import Continuation
from bridle.store.schema.database import Synchronous

LogLevel = Literal["debug", "info", "warning", "error"]

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "testserver"})


@lru_cache(maxsize=1024)
def is_loopback(host: str | None) -> bool:
    """True when ``host`` is a name or address of this machine that no other machine can reach."""
    if not host:
        return False
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


Amount = Annotated[int, msgspec.Meta(ge=0)]


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds of what a session may spend; ``None`` where there is none."""

    calls: Amount | None = None
    tokens: Amount | None = None
    """Sampled tokens; of an upstream that reports no ids, the completion tokens it reports."""
    wall_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times after which the proxy says no instead of growing or waiting."""

    body_bytes: int = 64 * 1024 * 1024
    header_bytes: int = 64 * 1024
    memory_bytes: int = 32 << 20
    """What a process keeps in memory of the sessions in use, roughly, so that a call costs what is
    new in it; what does not fit is read again from the store (``bridle_sessions_read_total``). The
    store's writer keeps half as much beside it, to compare requests with."""
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 600.0
    """The longest silence of the engine within one reply, time to the first token included."""
    keep_alive_s: float = 15.0
    """A stream that has been silent for this long gets the dialect's keep-alive event."""
    max_connections: int = 4096
    """Concurrent connections to each engine; calls beyond it wait for one."""
    retries: int = 2
    """How often a call is sent again that an engine refused or dropped before the first byte."""
    failures_to_eject: int = 3
    """Failed calls or health checks in a row after which an engine is left alone for a while."""
    health_check_s: float = 2.0
    """Time between health checks of an engine; 0 for none."""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model beside the policy: frozen, or another provider's. Recorded, never trained."""

    urls: tuple[str, ...]
    """Base URLs of the engines that serve it, without ``/v1``."""
    model: str | None = None
    """Its name there; ``None``: the first that the engine lists, or what the client says when it is
    external."""
    api_key: str | None = field(default=None, repr=False)
    external: bool = False
    """Any OpenAI-compatible API: it is not asked for token ids, and its records have none."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """One proxy process: where the engine is, where the record goes, who may come in.

    Raises ``ValueError`` when ``role_models`` has a name that ``other_models`` has not: that
    role's calls would go to the policy and be trained on.
    """

    upstream_url: str
    """Base URL of the (first) engine without ``/v1``; a trailing ``/v1`` is taken off."""
    store_url: str
    """SQLAlchemy URL, for example ``sqlite:///runs/bridle.db``."""
    engine_transport: Literal["fast", "plain"] = "fast"
    """``plain`` is the reference implementation, with a connection for each request: to compare
    with when a fault may lie in the fast one."""
    synchronous: Synchronous = "NORMAL"
    """SQLite's pragma: ``NORMAL`` keeps every commit through ``kill -9``, ``FULL`` also through a
    power cut, for a wait on the disk in every call."""
    host: str = "127.0.0.1"
    port: int = 0
    """``0`` takes a free port; ``ProxyServer.base_url`` tells which."""
    public_url: str | None = None
    """What clients call this proxy, for the base URLs handed out; else from the request's Host."""
    more_engines: tuple[str, ...] = ()
    """Base URLs of further engines that serve the same policy."""
    admin_key: str | None = field(default=None, repr=False)
    """Opens everything. Without one, control routes answer on loopback only."""
    upstream_api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    """The served model's name; ``None`` takes the first that ``/v1/models`` of the engine lists."""
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Client's model name -> served model name, before ``model`` applies."""
    other_models: Mapping[str, OtherModel] = field(default_factory=dict)
    """By the model's name as the client says it, or a pattern of names such as ``*-haiku-*``."""
    role_models: Mapping[str, str] = field(default_factory=dict)
    """Role of a (sub-)agent, or ``subagent`` for all of them -> a name that ``other_models``
    has, or has a pattern for."""
    budget: Budget = field(default_factory=Budget)
    """Of every session, unless its own settings say otherwise."""
    tokenizer_dir: Path | None = None
    """The served model's tokenizer and chat template; needed for exact continuation."""
    continuation: Continuation = Continuation.EXACT
    """For sessions that do not say."""
    log_format: Literal["text", "json"] | None = None
    """How this process writes its log to standard error; ``None`` leaves logging as it is."""
    log_level: LogLevel = "info"
    """The least that is written: ``info`` has a line for every call."""
    tracing: bool = False
    """OpenTelemetry spans of the calls; needs the extra ``[otel]``."""
    workers: str | None = None
    """Names the worker processes of one port, whose metrics are reported together; ``None`` for a
    process that has its port alone."""
    redact: bool = False
    """Scrub what looks like a secret from recorded bodies (``store/writing/redaction.py``)."""
    stream_upstream: bool = False
    """Stream from the engine also when the client does not: partial replies are kept and every
    token knows its policy version, for about a third of the speed."""
    when_store_is_down: Literal["fail", "forward"] = "fail"
    """``forward`` answers unrecorded and counts it in ``bridle_unrecorded_calls_total``."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for role, name in self.role_models.items():
            if not any(name == other or fnmatchcase(name, other) for other in self.other_models):
                raise ValueError(f"role model {role}={name}: there is no other model {name}")

    @property
    def open_on_loopback(self) -> bool:
        """Whether loopback clients may come in without a key."""
        return is_loopback(self.host)

    @property
    def engine_urls(self) -> tuple[str, ...]:
        return (self.upstream_url, *self.more_engines)
