"""The upstreams of routes beside chat: embeddings, moderations, files and the like.

Such requests and replies are passed on as they are. They are rare beside calls, so that a general
HTTP client serves them, which is imported at the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from bridle.proxy.engines.errors import without_keys
from bridle.proxy.settings import OtherRoute, ProxySettings, engine_base
from bridle.proxy.wire.canonical import ApiError

if TYPE_CHECKING:
    import httpx

_PASSED_ON: Final = ("accept", "content-type")
"""The client's headers that the upstream gets; its key is the proxy's."""


class Passed(NamedTuple):
    """A reply as the upstream sent it."""

    status: int
    content_type: str
    body: bytes


class BesideChat:
    """The clients of the upstreams. Create it inside the event loop that uses it."""

    def __init__(self, settings: ProxySettings) -> None:
        self._routes = settings.routes
        self._limits = settings.limits
        self._own_keys = settings.own_keys
        provider = settings.other_models.get("*")
        self._provider: OtherRoute | None = None
        if provider is not None and provider.external:
            self._provider = OtherRoute(provider.urls[0], provider.api_key)
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def ask(
        self, name: str, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Passed:
        """Pass a request on, and return the reply.

        ``target`` is its path and query from ``/v1`` on. Raise :class:`ApiError`: 404 without an
        upstream for ``name``, 502 for one that cannot be reached, 504 for one that stays silent.
        """
        import httpx

        route = self._routes.get(name, self._provider)
        if route is None:
            remedy = f"name an upstream with `bridle proxy --set routes.{name}.url=URL`"
            message = f"this proxy serves no {name}: {remedy}"
            raise ApiError("not_found", message, status=404)
        asked = {one: headers[one] for one in _PASSED_ON if one in headers}
        try:
            async with self._client(route).stream(
                method, target, headers=asked, content=body
            ) as reply:
                found = await self._read(name, reply)
                content_type = reply.headers.get("content-type", "application/octet-stream")
                return Passed(reply.status_code, content_type, found)
        except httpx.TimeoutException as error:
            message = f"the upstream for {name} sent nothing for {self._limits.stall_timeout_s:g} s"
            raise ApiError("upstream_timeout", message, status=504) from error
        except httpx.HTTPError as error:
            message = f"the upstream for {name} cannot be reached"
            raise ApiError("upstream_unreachable", message, status=502) from error

    async def _read(self, name: str, reply: httpx.Response) -> bytes:
        found = bytearray()
        async for piece in reply.aiter_raw():
            found += piece
            if len(found) > self._limits.body_bytes:
                message = f"the reply of {name} is larger than {self._limits.body_bytes} bytes"
                raise ApiError("upstream_error", f"{message} (body_bytes)", status=502)
        return without_keys(bytes(found), self._own_keys)

    def _client(self, route: OtherRoute) -> httpx.AsyncClient:
        import httpx

        if (client := self._clients.get(route.url)) is None:
            key = {} if route.api_key is None else {"authorization": f"Bearer {route.api_key}"}
            limits = self._limits
            client = self._clients[route.url] = httpx.AsyncClient(
                base_url=engine_base(route.url),
                headers={**key, "accept-encoding": "identity"},
                timeout=httpx.Timeout(limits.stall_timeout_s, connect=limits.connect_timeout_s),
                trust_env=False,
            )
        return client

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
