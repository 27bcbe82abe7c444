"""What the proxy needs of an HTTP client for one engine.

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
"""Of what :meth:`EngineResponse.read` reads: model lists, token counts, refusals."""

Follower = Callable[[bytes], "asyncio.Future[Any] | None"]
"""Takes the bytes of one read; returns what to wait for before more is read, if anything."""


class ConnectionFailed(BridleError):
    """No connection to the engine could be made."""

    retryable = True


class ConnectionBroke(BridleError):
    """The connection ended, or stopped making sense, before the response was whole."""

    retryable = True


class ConnectionEpochOver(BridleError):
    """Connections to the engine were lost meanwhile, all of them; nothing has been sent."""

    retryable = True


class Answer:
    """Follows a response whose body is wanted whole."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, piece: bytes) -> None:
        """Raises :class:`ConnectionBroke` beyond :data:`ANSWER_BYTES`."""
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
        """Lower-case names."""
        ...

    async def read(self) -> bytes:
        """The whole body, once. Raises ``TimeoutError``, and :class:`ConnectionBroke` also for a
        body of more than :data:`ANSWER_BYTES`."""
        ...

    async def follow(self, follower: Follower) -> None:
        """Gives the body to ``follower``, read by read, and returns when it is whole.

        Raises :class:`ConnectionBroke`, ``TimeoutError``, and whatever ``follower`` raises.
        """
        ...

    def close(self) -> None:
        """Ends the connection unless the response is whole; the engine then stops generating."""
        ...

    def leave(self) -> None:
        """The follower needs no more: :meth:`follow` returns."""
        ...


class EngineTransport(Protocol):
    """The connections to one engine, made inside the event loop that uses them."""

    connection_epoch: int
    """Grows when a connection is made while no other is open. Within one epoch the same process
    answers; after it, the engine may have been restarted."""
    any_open: bool
    """Whether the epoch continues; otherwise the next request begins another one."""

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
        """The response, its headers read. ``headers`` are whole lines, each with its line end;
        ``timeout_s`` replaces the stall timeout; ``connection_epoch``: send only within that one.

        Raises :class:`ConnectionFailed`, :class:`ConnectionBroke`, ``TimeoutError`` and
        :class:`ConnectionEpochOver`.
        """
        ...

    async def close(self) -> None:
        """Ends every connection, running responses included."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine's URL, taken apart."""

    url: SplitResult
    host: str
    port: int
    tls: bool
    prefix: str
    """The path before ``/v1``, quoted."""

    @classmethod
    def of(cls, base: str) -> EngineAddress:
        """Raises ``ValueError`` unless ``base`` is an HTTP URL."""
        url = urlsplit(base)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base!r} is not the URL of an engine")
        tls = url.scheme == "https"
        port = url.port or (443 if tls else 80)
        return cls(url, url.hostname, port, tls, quote(url.path, safe="/%:@!$&'()*+,;=~"))

    def headers(self, api_key: str | None) -> dict[str, str]:
        """The headers of every request. Raises ``ValueError`` for a key with a line end."""
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
