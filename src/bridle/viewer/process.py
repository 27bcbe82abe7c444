"""The pages in a process of their own, for the proxy that starts it (``bridle.run.pages_process``).

The process reads its settings from standard input, serves the pages on the listening socket that it
inherits, and ends when its standard input does. It answers requests with the token of its settings
alone, and has its own connections to the store. Neither keys nor the store's password are among its
arguments or in its environment.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import Final

import msgspec
import uvicorn
from fastapi import Request

from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.schema.database import shown
from bridle.viewer.app import pages_app
from bridle.viewer.rendering import Source
from bridle.viewer.scoring import ScoreForm

TOKEN: Final = "x-bridle-pages"  # noqa: S105 - the name of a header
FORM: Final = "x-bridle-form"
"""The header with the token of the form in the pages that a request gets."""
NEAR: Final = "x-bridle-near"
"""The header that is ``1`` if the person is on this machine."""
_YIELDS: Final = 10
"""The amount by which the process lowers its priority, so that a page does not delay a call."""


class PagesSettings(msgspec.Struct, frozen=True):
    """The settings of the process, one line of JSON on its standard input."""

    store: str
    root: str
    """The path below which the pages are."""
    token: str
    environment: dict[str, str] = {}
    """Variables that connections to a server need, such as ``PGPASSWORD``."""


def serve(settings: PagesSettings, listener: socket.socket) -> None:
    """Serve the pages until the process ends."""
    source = Source(Reader(settings.store), shown(settings.store))

    async def provide(request: Request) -> Source:
        given = request.headers.get(TOKEN, "")
        if not hmac.compare_digest(given.encode(), settings.token.encode()):
            raise NotFound("there is nothing here")
        form = ScoreForm(request.headers.get(FORM, ""), request.headers.get(NEAR) == "1")
        return replace(source, form=form)

    app = pages_app(provide, "", settings.root)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Read the settings, and serve on the socket whose number is the argument."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=PagesSettings)
    os.environ.update(settings.environment)
    os.nice(_YIELDS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(settings, socket.socket(fileno=int(sys.argv[1])))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
