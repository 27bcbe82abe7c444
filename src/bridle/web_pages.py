"""Refuse requests that a browser sends on behalf of a web page, at every server of ours.

A page that someone opens on this machine can send requests to loopback. If its host name resolves
to 127.0.0.1, our server even looks like the page's own. Browsers mark such requests in three
headers that no page can change: ``Origin``, ``Sec-Fetch-Site`` and ``Host``. Harnesses do not send
the first two.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, NamedTuple

import msgspec

Headers = Iterable[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_OWN_SITE: Final = (b"same-origin", b"none")


class Refusal(NamedTuple):
    status: int
    message: str


def refusal(headers: Headers, *, only_loopback: bool = False) -> Refusal | None:
    """Return the reason to refuse a request with these headers, or ``None`` to serve it.

    The headers' names are in lower case.

    ``only_loopback`` is for a server that asks for no key: a ``Host`` header must then name this
    machine's loopback address.
    """
    host: bytes | None = None
    origin = site = b""
    for name, value in headers:
        if name == b"host":
            if host is not None:
                return Refusal(400, "the request has several Host headers")
            host = value
        elif name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            site = value
    if host is not None and not _HOST.fullmatch(host):
        return Refusal(400, "the Host header is not a host with an optional port")
    if site and site.lower() not in _OWN_SITE:
        return Refusal(403, "a web page of another site may not ask this server")
    if origin and origin.lower().partition(b"://")[2] != (host or b"").lower():
        return Refusal(403, "a web page of another origin may not ask this server")
    if only_loopback and host is not None and not _names_loopback(host.decode()):
        return Refusal(403, "ask for 127.0.0.1 or localhost: this server serves this machine only")
    return None


def _names_loopback(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class NoWebPages:
    """ASGI middleware that refuses such requests, for servers with no error format of their own."""

    def __init__(self, app: App, *, only_loopback: bool) -> None:
        self._app = app
        self._only_loopback = only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http":
            found = refusal(scope["headers"], only_loopback=self._only_loopback)
        if found is None:
            await self._app(scope, receive, send)
            return
        body = msgspec.json.encode({"error": {"message": found.message, "type": "permission"}})
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": found.status, "headers": head})
        await send({"type": "http.response.body", "body": body})
