"""Middleware for vLLM's server that requires the key on every route, not only below ``/v1``.

vLLM checks ``--api-key`` only below ``/v1``. Its control routes (pause, weights,
``collective_rpc``) are open to all who reach the port, and with them the policy. ``/health``
answers without a key. The key comes from a file, so that no process has it in its environment.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OPEN = "/health"
KEY_FILE_VARIABLE = "BRIDLE_GUARD_KEY_FILE"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """A middleware that answers 401 to requests without ``Authorization: Bearer KEY``."""

    def __init__(self, app: App) -> None:
        self._app = app
        with open(os.environ[KEY_FILE_VARIABLE], "rb") as file:
            self._wanted = b"Bearer " + file.read()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == OPEN or self._may(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error":{"message":"send the key: Authorization: Bearer KEY"}}'
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _may(self, scope: Message) -> bool:
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(sent, self._wanted)
