"""The address of an engine, and the addresses that are no engine's.

The latter are link-local addresses, where clouds serve a machine's credentials.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

_METADATA: Final = frozenset({"metadata", "metadata.google.internal", "instance-data"})
_METADATA_ADDRESSES: Final = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192"))
)


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
        """Return the headers of every request.

        Raises ``ValueError`` for a key or an address with a line end.
        """
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


def require_engine_address(url: str) -> None:
    """Raise ``ValueError`` for a URL that cannot be an engine's.

    Such a URL names or resolves to a link-local address or a cloud's metadata service. The resolver
    is asked, so call this off the event loop.
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host in _METADATA:
        raise ValueError(f"{url} is a metadata service, not an engine")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return  # A call to it fails, and says so.
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        mapped = getattr(ip, "ipv4_mapped", None) or ip
        if mapped.is_link_local or mapped in _METADATA_ADDRESSES:
            raise ValueError(f"{url} is a link-local address, not an engine's")
