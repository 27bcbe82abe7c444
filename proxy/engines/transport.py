"""The interface of the HTTP client that the proxy uses for one engine.

:class:`bridle.proxy.engines.connections.EngineConnections` is the implementation; the tests of the
interface also run over a plain one, on h11.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, quote, unquote, urlsplit

from bridle.errors import BridleError

ANSWER_BYTES: Final = 16 << 20
"""Maximum bytes of a body that :meth:`EngineResponse.read` reads: a model list, a token count or a
refusal."""

Follower = Callable[[bytes], "asyncio.Future[Any] | None"]
"""A callback for the bytes of one read. It returns a future to await before more is read, or
``None``."""


class ConnectionFailed(BridleError):
    """No connection to the engine could be made."""

    retryable = True


class ConnectionBroke(BridleError):
    """The connection ended, or stopped making sense, before the response was whole."""

    retryable = True


class ConnectionEpochOver(BridleError):
    """All connections to the engine were lost since the given epoch; nothing has been sent."""

    retryable = True


class Answer:
    """A follower that collects the whole body of a response."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, piece: bytes) -> None:
        """Add a piece of the body. Raises :class:`ConnectionBroke` beyond :data:`ANSWER_BYTES`."""
        self._size += len(piece)
        if self._size > ANSWER_BYTES:
            raise ConnectionBroke(f"the answer has more than {ANSWER_BYTES} bytes")
        self._pieces.append(piece)

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)


class EngineResponse(Protocol):
    """One response from its status line on."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]:
        """The response's headers, with lower-case names."""
        ...

    async def read(self) -> bytes:
        """Read the whole body, once. Raises ``TimeoutError`` and :class:`ConnectionBroke`, the
        latter also for a body of more than :data:`ANSWER_BYTES`."""
        ...

    async def follow(self, follower: Follower) -> None:
        """Pass the body to ``follower``, read by read, and return when it is whole.

        Raises :class:`ConnectionBroke`, ``TimeoutError``, and any exception that ``follower``
        raises.
        """
        ...

    def close(self) -> None:
        """End the connection unless the response is whole; the engine then stops generating."""
        ...

    def leave(self) -> None:
        """Make :meth:`follow` return, because the follower needs no more."""
        ...


class EngineTransport(Protocol):
    """The connections to one engine, made inside the event loop that uses them."""

    connection_epoch: int
    """A number that grows when a connection is made while no other is open. Within one epoch the
    same process answers; in a later one, the engine may have been restarted."""
    any_open: bool
    """Whether a connection is open; if none is, the next request begins another epoch."""

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: str = "",
        timeout_s: float | None = None,
        connection_epoch: int | None = None,
    ) -> EngineResponse:
        """Send a request and return the response once its headers are read. ``headers`` are whole
        lines, each with its line end. ``timeout_s`` replaces the stall timeout. With
        ``connection_epoch``, the request is sent only within that epoch.

        Raises :class:`ConnectionFailed`, :class:`ConnectionBroke`, ``TimeoutError`` and
        :class:`ConnectionEpochOver`.
        """
        ...

    async def close(self) -> None:
        """End every connection, running responses included."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The parts of an engine's URL."""

    url: SplitResult
    host: str
    port: int
    tls: bool
    prefix: str
    """The path before ``/v1``, quoted."""

    @classmethod
    def of(cls, base: str) -> EngineAddress:
        """Parse the URL of an engine. Raises ``ValueError`` unless ``base`` is an HTTP URL."""
        url = urlsplit(base)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base!r} is not the URL of an engine")
        tls = url.scheme == "https"
        port = url.port or (443 if tls else 80)
        return cls(url, url.hostname, port, tls, quote(url.path, safe="/%:@!$&'()*+,;=~"))

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers of every request. Raises ``ValueError`` for a key or an address with a
        line end."""
        headers = {
            "host": self.url.netloc.rpartition("@")[2],
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        elif self.url.username is not None:
            pair = f"{unquote(self.url.username)}:{unquote(self.url.password or '')}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        if any("\r" in value or "\n" in value for value in headers.values()):
            raise ValueError("the engine's key or address has a line end in it")
        return headers
