"""Several worker processes behind one port, under uvicorn's supervisor.

All workers accept connections from one listening socket; no session is bound to a worker. A worker
that dies or hangs is replaced, and connections wait in the socket meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final, Self

from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from bridle.proxy.app import App, Pages, Routers
from bridle.proxy.server import BACKLOG, ProxyStartFailed, config_for, listening, local_url, tune_gc
from bridle.proxy.settings import ProxySettings

_HUNG_S: Final = 60
"""Seconds without a response after which a worker is replaced. On a busy machine a start takes a
while."""


class WorkerPool:
    """``count`` workers on one port, from :meth:`serve` until SIGINT or SIGTERM."""

    def __init__(
        self,
        settings: ProxySettings,
        count: int,
        routers: Routers = (),
        pages: Pages | None = None,
    ) -> None:
        """Create the pool.

        ``routers`` and ``pages`` must be module-level functions, or partial ones: each worker calls
        them.
        """
        self._settings = settings
        self._count = count
        self._routers = tuple(routers)
        self._pages = pages
        self._socket = listening(settings.host, settings.port)
        self._socket.listen(BACKLOG)

    @property
    def base_url(self) -> str:
        """The base URL for clients on this machine; connections wait until a worker has started."""
        return local_url(self._settings.host, int(self._socket.getsockname()[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def serve(self) -> None:
        """Serve until a signal ends it; call it from the main thread.

        Raise :class:`ProxyStartFailed` when a worker does not start.
        """
        settings = replace(self._settings, workers=True)
        config = config_for(
            partial(_app, settings, self._routers, self._pages),
            factory=True,
            workers=self._count,
            timeout_worker_healthcheck=_HUNG_S,
            timeout_graceful_shutdown=30,
            log_level="warning",
        )
        self._socket.set_inheritable(True)
        supervisor = _Supervisor(config, sockets=[self._socket])
        supervisor.run()
        if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
            raise ProxyStartFailed("the proxy's workers did not start; see the log")


class _Supervisor(Multiprocess):
    def keep_subprocess_alive(self) -> None:
        """Close the workers' ends of the pipes in this process.

        Otherwise the supervisor would wait until the time-out for a worker that dies during a
        health check.
        """
        for process in self.processes:
            process.child_conn.close()
        super().keep_subprocess_alive()


def _app(settings: ProxySettings, routers: Routers, pages: Pages | None) -> App:
    tune_gc()
    return App(settings, routers, pages)
