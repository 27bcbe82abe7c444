"""Addresses that are no engine's: link-local ones, where clouds serve a machine's credentials."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

_METADATA: Final = frozenset({"metadata", "metadata.google.internal", "instance-data"})
_METADATA_ADDRESSES: Final = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192"))
)


def require_engine_address(url: str) -> None:
    """Raise ``ValueError`` for a URL that names or resolves to a link-local address or a cloud's
    metadata service. The resolver is asked, so call this off the event loop."""
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
