"""Whether a call's client is still there, asked only of calls that take a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Final

from bridle.errors import BridleError

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]

_UNWATCHED_S: Final = 0.05
"""How long a call runs before it is watched whether its client is still there: most replies of a
fast engine are whole by then, and a task for each of them would cost more than it could save."""


class ClientGone(BridleError):
    """The client closed its connection before its reply was complete."""


class Watch:
    """One timer for all calls of an event loop that are not watched yet."""

    def __init__(self) -> None:
        self._young: dict[Presence, float] = {}
        """When each call began, oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, presence: Presence) -> None:
        loop = asyncio.get_running_loop()
        self._young[presence] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(_UNWATCHED_S, self._look, loop)

    def discard(self, presence: Presence) -> None:
        self._young.pop(presence, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() - _UNWATCHED_S
        old = [presence for presence, began in self._young.items() if began <= due]
        for presence in old:
            del self._young[presence]
            presence.begin()
        self._timer = None
        if self._young:
            self._timer = loop.call_later(_UNWATCHED_S / 2, self._look, loop)


class Presence:
    """Runs a block while the client is there, and cuts it when the client has gone.

    Entered and left like :class:`asyncio.Timeout`: what cuts the block is a cancellation of our
    own, told from others' by the task's count of them.
    """

    __slots__ = ("_cancelling", "_gone", "_receive", "_task", "_watch", "_watching")

    def __init__(self, watch: Watch, receive: Receive) -> None:
        self._watch = watch
        self._receive = receive
        self._gone = False
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "inside a task"  # noqa: S101 - a programming error
        self._task = task
        self._cancelling = task.cancelling()
        self._watch.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.discard(self)
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # its end holds a traceback that leads back here
        if not self._gone:
            return
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error

    def begin(self) -> None:
        """From now on the client is watched."""
        self._watching = asyncio.ensure_future(self._disconnected())

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
