"""Runs a proxy in a thread of this process."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Self

import uvicorn

from bridle.errors import BridleError
from bridle.proxy.app import Pages, Routers, create_app
from bridle.proxy.http.protocol import StreamingProtocol
from bridle.proxy.settings import ProxySettings

_START_S = 30.0


class ProxyStartFailed(BridleError):
    """The proxy did not start. Its message has the reason, or else the log has it."""


BACKLOG: Final = 4096


def config_for(app: Callable[..., Any], **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings for one of the proxy's applications, or for a factory of it."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=StreamingProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        # X-Forwarded-For must not make a remote client look local.
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        backlog=BACKLOG,
        **options,
    )


class ProxyServer:
    """A proxy in a thread of this process, for as long as the context is open."""

    def __init__(
        self,
        settings: ProxySettings,
        *,
        routers: Routers = (),
        pages: Pages | None = None,
        grace_s: int = 5,
    ) -> None:
        """Create the server.

        ``routers`` make further routes of the control API, and ``pages`` makes the application
        under ``/bridle/viewer``. :meth:`stop` cuts the calls that still run after ``grace_s``
        seconds.
        """
        self._app = create_app(settings, routers, pages)
        config = config_for(self._app, timeout_graceful_shutdown=grace_s, log_level="warning")
        self.settings = settings
        self._server = uvicorn.Server(config)
        self._socket = listening(settings.host, settings.port)
        self._thread = threading.Thread(target=self._serve, name="bridle-proxy", daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def base_url(self) -> str:
        """The proxy's URL for clients on this machine, without ``/v1``."""
        return local_url(self.settings.host, self.port)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the proxy and return once it serves. Raise :class:`ProxyStartFailed`."""
        self._thread.start()
        deadline = threading.Event()
        for _ in range(int(_START_S / 0.01)):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            deadline.wait(0.01)
        raise ProxyStartFailed(self._app.refusal or "the proxy did not start; see the log")

    def stop(self) -> None:
        """Stop the proxy.

        Return when running calls have finished or been cut, and all queued records are written.
        """
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        self._app.listener = self._socket
        self._server.run(sockets=[self._socket])


def tune_gc() -> None:
    """Set up garbage collection for a process that only runs a proxy, before the proxy starts."""
    # Every stream waits while the collector looks, and the long-lived turns and few cycles of a
    # recording proxy are little work for it: it looks often at a few young objects, rarely at all.
    gc.freeze()
    gc.set_threshold(1_000, 20, 250)


def local_url(host: str, port: int) -> str:
    """Return the URL of a server bound to ``host`` for clients on this machine."""
    host = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"http://{host}:{port}"


def listening(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener
