"""``bridle viewer``: show the store's pages in a browser."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from bridle.cli.options import JsonOption, StoreOption, tokenizer_path
from bridle.cli.reading import reader
from bridle.cli.serving import announce, leave_on_sigterm, listening_on
from bridle.store.schema.database import shown

YIELDS: Final = 10
"""The amount by which the process lowers its priority, so that serving a page does not delay a
proxy on the same machine."""


def viewer(
    store: StoreOption,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8700,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            parser=tokenizer_path,
            metavar="MODEL",
            help="Directory or Hub name, if the store has no texts.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show sessions, tokens, trees and runs in a browser.

    It only reads, and serves this machine alone.
    """
    import uvicorn

    from bridle.viewer.app import viewer_app
    from bridle.viewer.rendering import Source, token_text
    from bridle.web_pages import NoWebPages

    with reader(store) as source, listening_on("127.0.0.1", port), socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()  # what asks before uvicorn accepts is kept waiting, not refused
        app = viewer_app(Source(source, shown(store), token_text(tokenizer)))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        announce(url, json, f"Open {url} (Ctrl-C ends the viewer)")
        closed = NoWebPages(app, only_loopback=True)
        server = uvicorn.Server(uvicorn.Config(closed, log_level="warning", lifespan="off"))
        os.nice(YIELDS)
        # The server raises the signal that ended it again, when it is done.
        leave_on_sigterm()
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
