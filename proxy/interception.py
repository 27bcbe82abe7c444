"""A mitmproxy addon that redirects requests for a provider to a session of the proxy.

mitmproxy runs it in a process and an environment of its own (``mitmdump -s``), where nothing of
Bridle can be imported. Only connections to the addresses in ``allow_hosts`` are opened here; all
others pass through as they are.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from mitmproxy import ctx
from mitmproxy.http import HTTPFlow

_CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_API = re.compile(r"/v1(?:alpha|beta)?(?:/|$)")
"""The start of the part of a path that all clients of a provider's API share. Some clients have a
prefix before it."""


class Interception:
    def load(self, loader: Any) -> None:
        loader.add_option("bridle_url", str, "", "Root of the session at the proxy.")
        loader.add_option("bridle_key", str, "", "The session's key.")

    def requestheaders(self, flow: HTTPFlow) -> None:
        root, request = urlsplit(ctx.options.bridle_url), flow.request
        found = _API.search(request.path.partition("?")[0])
        path = request.path[found.start() :] if found else request.path
        request.scheme, request.host = root.scheme, root.hostname or ""
        request.port = root.port or (443 if root.scheme == "https" else 80)
        request.path = root.path + path
        request.host_header = root.netloc
        for name in _CREDENTIALS:
            request.headers.pop(name, None)
        if "key" in request.query:
            del request.query["key"]
        request.headers["authorization"] = f"Bearer {ctx.options.bridle_key}"

    def responseheaders(self, flow: HTTPFlow) -> None:
        if flow.response is not None:
            flow.response.stream = True


addons = [Interception()]
