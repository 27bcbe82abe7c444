"""The settings of one proxy, as one immutable value."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from bridle.store import processes
from bridle.store.declaration import SHORT_TEXT
from bridle.store.records import DEFAULT_POLICY, Continuation
from bridle.store.schema.database import Synchronous

if TYPE_CHECKING:
    from bridle.store.reading.queries import Reader

LogLevel = Literal["debug", "info", "warning", "error"]

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "testserver"})


@lru_cache(maxsize=1024)
def is_loopback(host: str | None) -> bool:
    """Return whether ``host`` is this machine and no other machine can reach it.

    ``host`` is a name or an address.
    """
    if not host:
        return False
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


SHORTEST_KEY = 8
"""Minimum number of characters of a key that is searched for in engines' replies. Shorter ones,
such as ``EMPTY`` and ``none``, are placeholders and words."""

Amount = Annotated[int, msgspec.Meta(ge=0)]


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds of a session's use; ``None`` means no bound."""

    calls: Amount | None = None
    tokens: Amount | None = None
    """Sampled tokens; for an upstream without token ids, the completion tokens that it reports."""
    wall_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on sizes, times and numbers, beyond which the proxy refuses a request or ends it.

    Each refusal is logged and counted: ``bridle_refused_requests_total`` by its kind, and
    ``bridle_events_total`` under ``limit_NAME`` for an engine's reply and for connections.
    ``bridle proxy --set limits.NAME=VALUE`` sets one.
    """

    body_bytes: int = 8 << 20
    """Maximum bytes of a request's body."""
    header_bytes: int = 64 << 10
    """Maximum bytes of a request's head."""
    head_timeout_s: float = 20.0
    """Maximum seconds that the head of a request may take, and that a new connection may wait for
    its first request."""
    body_timeout_s: float = 60.0
    """Maximum seconds that the body of a request may take."""
    connections: int = 2048
    """Maximum number of clients' connections to a process. It is lower if the process may not open
    twice as many files."""
    choices: int = 64
    """Maximum number of choices (``n``) of one request."""
    event_bytes: int = 8 << 20
    """Maximum bytes of an engine's reply that are decoded at once: one event of a stream, or a
    whole reply."""
    reply_bytes: int = 64 << 20
    """Maximum bytes of an engine's stream, and of the reply that its client gets."""
    reply_characters: int = 2 << 20
    """Maximum characters of the texts, thoughts and tool arguments of an engine's reply. A model
    writes about four characters with a token."""
    in_flight_bytes: int = 96 << 20
    """Maximum memory of a process, in bytes, for the bodies and replies of all running calls.
    Beyond it, the largest calls are ended."""
    memory_bytes: int = 32 << 20
    """Approximate memory of a process, in bytes, for the sessions in use. A call of a session in
    memory costs only its new part. A session that does not fit is read again from the store
    (``bridle_sessions_read_total``). The store's writer uses half as much in addition, to compare
    requests."""
    connect_timeout_s: float = 10.0
    store_patience_s: float = 30.0
    """Seconds that a record waits for a store that is locked or unreachable."""
    stall_timeout_s: float = 600.0
    """Maximum seconds for which the engine may be silent within one reply, including the time to
    the first token."""
    keep_alive_s: float = 15.0
    """Seconds without events after which a stream gets the dialect's keep-alive event."""
    max_connections: int = 4096
    """Maximum number of concurrent connections to each engine; further calls wait for one."""
    retries: int = 2
    """Number of times that a call is sent again after an engine refused or dropped it before the
    first byte."""
    failures_to_eject: int = 3
    """Number of consecutive failed calls or health checks after which an engine gets no calls for a
    while."""
    health_check_s: float = 2.0
    """Seconds between health checks of an engine; 0 disables them."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 0:
                raise ValueError(f"{one.name} is less than 0")


_ROUTES: Final = (
    *("/chat/completions", "/completions", "/responses", "/messages", "/models", "/embeddings"),
    *("/tokenize", "/health", "/metrics"),
)
"""Routes that a pasted address may end in."""


def engine_base(url: str) -> str:
    """Return an engine's base URL.

    It is ``url`` without a route, such as ``/v1/chat/completions``, and without ``/v1``.
    """
    base = url.rstrip("/")
    for route in _ROUTES:
        base = base.removesuffix(route)
    return base.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model other than the policies: frozen, or of another provider.

    It is recorded, never trained.
    """

    urls: tuple[str, ...]
    """Base URLs of the engines that serve the model, without ``/v1``."""
    model: str | None = None
    """The model's name at the engine. ``None`` means the first model that the engine lists, and for
    an external model the client's name."""
    api_key: str | None = field(default=None, repr=False)
    external: bool = False
    """True if the model is served by any OpenAI-compatible API, which is not asked for token ids
    and reports none."""
    key_variable: str | None = None
    """Name of the environment variable from which ``bridle proxy`` takes ``api_key``."""
    dialects: tuple[str, ...] | None = None
    """The dialects that an external model's API serves itself, of ``messages``, ``responses`` and
    ``google``. A client's request in one of them is passed on as it is. ``None`` takes what is
    known of the address."""


@dataclass(frozen=True, slots=True)
class OtherRoute:
    """An upstream for routes beside chat, such as ``/v1/embeddings``.

    What it replies is recorded and passed on as it is.
    """

    url: str
    """Its base URL, without ``/v1``."""
    api_key: str | None = field(default=None, repr=False)
    key_variable: str | None = None
    """Name of the environment variable from which ``bridle proxy`` takes ``api_key``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The settings of a proxy that ``bridle proxy`` reads from ``--config FILE`` and ``--set``."""

    model: str | None = None
    """The served model's name; ``None`` takes the first that ``/v1/models`` of the engine lists."""
    other_models: Mapping[str, OtherModel] = field(default_factory=dict)
    """Models other than the policies, by the model name in the client's request or by a pattern of
    names such as ``*-haiku-*``."""
    routes: Mapping[str, OtherRoute] = field(default_factory=dict)
    """Upstreams for routes beside chat, by the part of the path after ``/v1``: ``embeddings``,
    ``moderations``, ``rerank``, ``images``, ``audio``, ``files`` or ``batches``."""
    policies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Base URLs of the engines that serve each further trained policy, by the policy's name, which
    clients give as their model. Requests to them carry ``upstream_api_key``. All policies of a
    proxy have one tokenizer and chat template. A policy may share an engine with others, as a LoRA
    adapter: it gets no calls before the name of its adapter has been published."""
    dialects: tuple[str, ...] = ()
    """Further dialects as ``FILE.py:NAME`` or ``MODULE:NAME``; those of installed distributions are
    served without being named."""
    role_models: Mapping[str, str] = field(default_factory=dict)
    """The model for each role of a (sub-)agent, or for ``subagent``, which means all of them. It is
    the name of a policy, or a name or a match of a pattern in ``other_models``."""
    budget: Budget = field(default_factory=Budget)
    """The default budget of a session. A bound in the session's own settings replaces the one
    here."""
    continuation: Continuation = Continuation.EXACT
    """The continuation of sessions that are opened without one."""
    log_format: Literal["text", "json"] | None = None
    """Format of this process's log on standard error. ``None`` is ``text`` for ``bridle proxy``,
    and does not configure logging elsewhere."""
    log_level: LogLevel = "warning"
    """The lowest level that is written; ``info`` includes a line for every call."""
    tracing: bool = False
    """Trace calls as OpenTelemetry spans; this needs the extra ``[otel]``."""
    seal_idle_s: float = 0.0
    """Seconds without calls after which a session without a key is sealed, so that it reaches the
    feed; 0 disables this."""
    feed_stores: tuple[str, ...] = field(default=(), repr=False)
    """Further stores, those of other deployments, from which the feed of this proxy leases sessions
    too."""
    redact: bool = False
    """Remove text that looks like a secret from recorded bodies
    (``store/writing/redaction.py``)."""
    stream_upstream: bool = False
    """Stream replies from the engine even if the client does not stream. Partial replies
    are then kept, and every token has its policy version, at about a third of the speed."""
    public_url: str | None = None
    """The proxy's URL for clients, used in the base URLs of sessions; ``None`` takes the request's
    Host."""
    synchronous: Synchronous = "NORMAL"
    """SQLite's pragma. ``NORMAL`` keeps every commit after ``kill -9``. ``FULL`` also keeps it
    after a power cut, but every call then waits for the disk."""
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class ProxySettings(ProxyConfig):
    """The engines, the store and the access rules of one proxy process, and its configuration.

    Raises ``ValueError`` for a name in ``role_models`` that is neither a policy's nor another
    model's: that role's calls would go to the default policy and be trained on. It also raises it
    for further ``policies`` that cannot be distinguished by name or by engine.
    """

    upstream_url: str
    """Base URL of the (first) engine; a trailing ``/v1`` is removed. Proxies with the same URL on
    one store are one deployment (``proxy/deployment.py``)."""
    store_url: str
    """SQLAlchemy URL, for example ``sqlite:///runs/bridle.db``."""
    host: str = "127.0.0.1"
    port: int = 0
    """The port; ``0`` takes a free one, which ``ProxyServer.base_url`` contains."""
    more_engines: tuple[str, ...] = ()
    """Base URLs of further engines that serve the same policy, the default one."""
    admin_key: str | None = field(default=None, repr=False)
    """The key that permits everything. Without one, everything is open on loopback; Bridle's own
    commands never start a proxy without one."""
    keyless_recording: bool = False
    """True if loopback clients may record without a key although there is an admin key."""
    private_files: tuple[Path, ...] = ()
    """Files with keys, which no session on this machine may see. The store is hidden from sessions
    too."""
    upstream_api_key: str | None = field(default=None, repr=False)
    tokenizer_dir: Path | None = None
    """The served model's tokenizer and chat template; needed for exact continuation."""
    workers: bool = False
    """True if this is one of several worker processes of one port. Its metrics then have its
    process id as their label ``worker``."""
    judge: Callable[[Reader, str], None] | None = None
    """A module-level function that is called in a thread with the id of each session that was
    sealed, to judge the session's calls from the record; ``None`` leaves that to readers."""

    def __post_init__(self) -> None:
        self._check_policies()
        named = {DEFAULT_POLICY, *self.policies, *self.other_models}
        for role, name in self.role_models.items():
            if name not in named and not any(fnmatchcase(name, one) for one in self.other_models):
                raise ValueError(f"role model {role}={name}: no policy or other model is {name}")

    def _check_policies(self) -> None:
        for name, urls in self.policies.items():
            if name == DEFAULT_POLICY:
                raise ValueError(f"policy {name}: this is the name of the default policy")
            if name in self.other_models:
                raise ValueError(f"policy {name}: an other model has this name")
            if not 0 < len(name) <= SHORT_TEXT:
                raise ValueError(f"policy {name}: a name has 1 to {SHORT_TEXT} characters")
            if not urls:
                raise ValueError(f"policy {name}: no engine serves it")

    def shares_engine(self, policy: str) -> bool:
        """Return whether an engine of a further policy serves another policy, too."""
        others = {name: urls for name, urls in self.policies.items() if name != policy}
        others[DEFAULT_POLICY] = tuple(self.engine_urls)
        taken = {engine_base(url) for urls in others.values() for url in urls}
        return any(engine_base(url) in taken for url in self.policies[policy])

    @property
    def own_keys(self) -> tuple[bytes, ...]:
        """The keys that an engine may know and a client may not, as they appear in its replies."""
        others = [one.api_key for one in self.other_models.values()]
        others += [one.api_key for one in self.routes.values()]
        keys = {key for key in (self.admin_key, self.upstream_api_key, *others) if key}
        return tuple([key.encode() for key in sorted(keys) if len(key) >= SHORTEST_KEY])

    @property
    def keyless(self) -> bool:
        """Return whether loopback clients may record without a key."""
        return is_loopback(self.host) and (self.keyless_recording or self.admin_key is None)

    @property
    def deployment(self) -> str:
        """The name that proxies with the same first engine share.

        A loopback URL is a different engine on each machine, so the name then includes the machine.
        """
        url = engine_base(self.upstream_url)
        return f"{url} of {processes.host()}" if is_loopback(urlsplit(url).hostname) else url

    @property
    def engine_urls(self) -> tuple[str, ...]:
        return (self.upstream_url, *self.more_engines)
