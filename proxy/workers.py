"""Several processes behind one port: uvicorn's own supervisor over one listening socket.

The kernel hands each connection to whichever worker accepts it first; sessions are bound to none.
A worker that dies or hangs is replaced, connections that wait are kept by the socket.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Self

from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from bridle.proxy.app import App, Routers
from bridle.proxy.server import BACKLOG, ProxyStartFailed, config_for, listening, local_url, tune_gc
from bridle.proxy.settings import ProxySettings
from bridle.store.records import new_id

_HUNG_S: Final = 60
"""A worker that is silent for so long is replaced; starting one on a busy machine takes a while."""


class WorkerPool:
    """``count`` workers on one port, from :meth:`serve` until SIGINT or SIGTERM."""

    def __init__(self, settings: ProxySettings, count: int, routers: Routers = ()) -> None:
        """``routers`` must be module-level functions: each worker makes its own."""
        self._settings = settings
        self._count = count
        self._routers = tuple(routers)
        self._socket = listening(settings.host, settings.port)
        self._socket.listen(BACKLOG)

    @property
    def base_url(self) -> str:
        """Where clients on this machine reach it; connections wait until a worker is up."""
        return local_url(self._settings.host, int(self._socket.getsockname()[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def serve(self) -> None:
        """Blocks; call it from the main thread, whose signals end it. Raises
        :class:`ProxyStartFailed` when a worker does not come up."""
        settings = replace(self._settings, workers=new_id("workers"))
        config = config_for(
            partial(_app, settings, self._routers),
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
        """A worker that dies while it is asked whether it lives is found at once: were its end of
        the pipe open here, too, its answer would be waited for until the time-out."""
        for process in self.processes:
            process.child_conn.close()
        super().keep_subprocess_alive()


def _app(settings: ProxySettings, routers: Routers) -> App:
    tune_gc()
    return App(settings, routers)
