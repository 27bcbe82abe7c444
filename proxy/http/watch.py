"""A periodic check of all requests that are being served, instead of a task for each.

After a short time, a request is watched for its client's disconnection, and the task that serves it
is then cancelled. A stream that has been silent for long gets a sign of life, because harnesses
hang up after minutes without a protocol event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from bridle.proxy.http.client import Client
from bridle.proxy.periodic import Periodic

_UNWATCHED_S: Final = 0.05
"""Seconds that a request runs before its client is watched. Most replies of a fast engine are
complete by then, and a task for each would cost more than it could save."""


class Watch:
    """The requests of one event loop.

    Each :meth:`enter` is paired with a :meth:`leave`, in the same task.
    """

    def __init__(self, keep_alive_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._young: dict[Client, float] = {}
        """Loop time at which each request began that is not watched yet, oldest first."""
        self._streams: dict[Client, Callable[[], None]] = {}
        """The function that gives each silent stream a sign of life."""
        self._timer: asyncio.TimerHandle | None = None
        self._sweeps = Periodic("keep-alive", keep_alive_s / 4, self._sweep)

    def start(self) -> None:
        self._sweeps.start()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._sweeps.close()

    def enter(self, client: Client, keep_alive: Callable[[], None] | None = None) -> None:
        """Register ``client``, which the current task serves and whose body has been read.

        ``keep_alive`` is called when its stream has been silent for long.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "inside a task"  # noqa: S101 - a programming error
        client.task, client.cancelling = task, task.cancelling()
        self._young[client] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(_UNWATCHED_S, self._look, loop)
        if keep_alive is not None:
            client.last_write = time.monotonic()
            self._streams[client] = keep_alive

    def leave(self, client: Client) -> bool:
        """Remove ``client``.

        Return whether the task was cancelled because the client has gone, and for no other reason.
        """
        self._young.pop(client, None)
        self._streams.pop(client, None)
        if client.watching is not None:
            client.watching.cancel()
            client.watching = None  # its end holds a traceback that leads back here
        task, client.task = client.task, None
        return client.gone and task is not None and task.uncancel() <= client.cancelling

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() - _UNWATCHED_S
        for client, began in list(self._young.items()):
            if began > due:
                break
            del self._young[client]
            client.watching = asyncio.ensure_future(client.disconnected())
        self._timer = None
        if self._young:
            self._timer = loop.call_later(_UNWATCHED_S / 2, self._look, loop)

    async def _sweep(self) -> None:
        limit = time.monotonic() - self._keep_alive_s
        for client, keep_alive in list(self._streams.items()):
            if client.last_write <= limit:
                keep_alive()
