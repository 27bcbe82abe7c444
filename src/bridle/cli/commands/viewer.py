"""``bridle viewer``: show the store's pages in a browser."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bridle.cli.commands.reward import operator_reward
from bridle.cli.options import JsonOption, PortOption, StoreOption, tokenizer_path
from bridle.cli.reading import nothing_found, one_session, reader
from bridle.cli.serving import announce, leave_on_sigterm, listening_on
from bridle.cli.terminal import fail, out, print_json
from bridle.errors import UsageError
from bridle.store.schema.database import shown
from bridle.store.writing.writer import Writer

if TYPE_CHECKING:
    from bridle.store.reading.queries import Reader
    from bridle.viewer.bundle import Scope
    from bridle.viewer.scoring import Record

YIELDS: Final = 10
"""The amount by which the process lowers its priority, so that serving a page does not delay a
proxy on the same machine."""


def viewer(
    store: StoreOption,
    about: Annotated[
        str | None,
        typer.Argument(metavar="[SESSION|RUN]", help="The session or run to bundle."),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write static pages to share, and end.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=5000, help="Newest sessions to bundle.")] = 50,
    port: PortOption = 8700,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            parser=tokenizer_path,
            metavar="MODEL",
            help="Directory or Hub name, if the store has no texts.",
        ),
    ] = None,
    browser: Annotated[
        bool | None,
        typer.Option("--browser/--no-browser", help="Open it; default: from a desktop's terminal."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show sessions, tokens, trees and runs in a browser.

    It serves this machine alone. With --bundle, it writes pages that need no server.
    """
    if bundle is not None:
        _write(store, about, bundle, limit, tokenizer, json)
        return
    if about is not None:
        raise UsageError(f"{about!r} is what --bundle DIR takes: the pages list all sessions")
    import uvicorn

    from bridle.viewer.app import viewer_app
    from bridle.viewer.rendering import Source, token_texts
    from bridle.viewer.scoring import ScoreForm
    from bridle.web_pages import NoWebPages

    leave_on_sigterm()
    with reader(store) as source, listening_on("127.0.0.1", port), socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()  # what asks before uvicorn accepts is kept waiting, not refused
        form = ScoreForm(secrets.token_urlsafe(32), near=True, record=_recording(store, source))
        app = viewer_app(Source(source, shown(store), token_texts(tokenizer), form))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        announce(url, json, f"Open {url} (Ctrl-C ends the viewer)")
        if _on_desktop() if browser is None else browser:
            webbrowser.open(url)
        closed = NoWebPages(app, only_loopback=True)
        server = uvicorn.Server(uvicorn.Config(closed, log_level="warning", lifespan="off"))
        os.nice(YIELDS)
        # The server raises the signal that ended it again, when it is done.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def _on_desktop() -> bool:
    """Return whether a person at a terminal has a graphical browser, which blocks no terminal."""
    graphical = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return sys.stdout.isatty() and (graphical or sys.platform == "darwin")


def _recording(store: str, source: Reader) -> Record:
    """Return the function that records what the pages' form sends, like ``bridle reward``."""

    def write(session: str, form: Mapping[str, str]) -> None:
        value, turn = _number(form, "value"), form.get("turn")
        new = operator_reward(
            source,
            source.session(session).id,
            form.get("name", ""),
            value,
            turn=None if not turn else int(_number(form, "turn")),
            note=form.get("note"),
        )
        with Writer(store) as writer:
            writer.add_sync(new)

    async def record(session: str, form: Mapping[str, str]) -> None:
        await asyncio.to_thread(write, session, form)

    return record


def _number(form: Mapping[str, str], field: str) -> float:
    try:
        return float(form[field])
    except (KeyError, ValueError):
        raise UsageError(f"{field} is a number, not {form.get(field, '')!r}") from None


def _write(
    store: str, about: str | None, folder: Path, limit: int, tokenizer: Path | None, json: bool
) -> None:
    """Write the bundle of a session or run, or of the newest sessions, and print where it is."""
    from bridle.viewer.bundle import INDEX, write_bundle
    from bridle.viewer.rendering import Source, token_texts

    with reader(store) as source:
        scope = _scope(source, about, limit)
        # The folders of this machine concern nobody who reads the bundle.
        name = Path(shown(store)).name
        pages = write_bundle(Source(source, name, token_texts(tokenizer)), scope, folder)
    index = folder / INDEX
    if json:
        print_json({"index": str(index), "pages": len(pages), "sessions": len(scope.sessions)})
        return
    out.print(f"Wrote {len(pages)} pages of {len(scope.sessions)} sessions. Open {index}")


def _scope(source: Reader, about: str | None, limit: int) -> Scope:
    from bridle.viewer.bundle import Scope

    run = about if about in {known.id for known in source.runs()} else None
    if about is not None and run is None:
        record = one_session(source, about)
        return Scope({record.id}, f"/sessions/{record.id}")
    newest = source.sessions(run=run, limit=limit, newest_first=True)
    found = {record.id for record in newest}
    if run is not None:
        return Scope(found, f"/runs/{run}", run)
    if not found:
        fail(nothing_found(source))
    return Scope(found, "/sessions")
