"""Static pages of chosen sessions, to share: the viewer's own pages, readable without a server.

:func:`write_bundle` reads the pages from the viewer's application and follows their links as far as
the bundle reaches. :class:`_Page` makes a file of a page: a part that htmx would ask for stands in
its place, or in a fold where a button asks for it; a link to a page of the bundle leads to its
file, and other links into the viewer have no address. Elements that need a server are left out:
forms, and what the templates mark by ``data-server``.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote_plus, urlencode, urlsplit

import httpx

from bridle.errors import BridleError, UsageError
from bridle.reconstruct.session import LoadedSession
from bridle.viewer.app import PART, viewer_app
from bridle.viewer.rendering import FOLDER, Source

INDEX: Final = "index.html"
_NAME: Final = 100
"""Maximum characters of a file's name, without its ending."""
_LISTS: Final = ("/sessions", "/groups", "/audit")
_VIEWS: Final = ("", "tree", "audit")
_SERVED_ONLY: Final = ("htmx.min.js", "README.md")
"""Static files that no page of a bundle asks for."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The sessions of a bundle, and the pages that it has of them."""

    sessions: Collection[str]
    """The ids of the sessions."""
    start: str
    """The address of the first page, ``/sessions`` for a list."""
    run: str | None = None
    """The run that all the sessions belong to, if the bundle has its page."""

    def page(self, path: str, query: Mapping[str, str]) -> str | None:
        """Return the address of the bundle's page at a path, or ``None`` if it has none.

        Lists have the bundle's sessions alone, the newest first, so that this goes without
        saying.
        """
        several = not self.start.startswith("/sessions/")
        if several and path in _LISTS:
            implied = {("page", "1"), ("order", "newest"), ("run", self.run)}
            query = dict(query.items() - implied)
            held = query.keys() <= {"page"}
        elif several and path == "/group":
            held = query.keys() == {"id"}
        else:
            place, _, rest = path[1:].partition("/")
            name, _, view = rest.partition("/")
            held = not query and (
                path == f"/runs/{self.run}"
                or (place == "sessions" and name in self.sessions and view in _VIEWS)
            )
        if not held:
            return None
        return f"{path}?{urlencode(query)}" if query else path


def write_bundle(source: Source, scope: Scope, folder: Path) -> list[Path]:
    """Write the pages of ``scope`` and their style and scripts to ``folder``; return the pages.

    ``folder`` is made if it is missing. The first of the pages is ``index.html``.

    Raise :class:`bridle.errors.UsageError` if ``folder`` is a file or has files, and
    :class:`bridle.errors.BridleError` if a page cannot be made.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} is no empty folder: name a new one for the bundle")
    kept = replace(
        source, load=lru_cache(maxsize=1)(LoadedSession.load), only=tuple(scope.sessions)
    )
    unused = shutil.ignore_patterns(*_SERVED_ONLY)
    shutil.copytree(FOLDER / "static", folder / "static", ignore=unused)
    pages = _Pages(scope)
    written = []
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(viewer_app(kept)), base_url="http://localhost"
        )

        def fetch(address: str) -> str:
            reply = runner.run(client.get(address))
            if reply.status_code != 200:
                raise BridleError(f"the page {address} cannot be made: status {reply.status_code}")
            return reply.text

        # The list grows while pages are read, by the pages to which they link.
        for address, name in pages.files:
            file = folder / name
            file.write_text(_Page(fetch, pages.link).made_of(fetch(address)), "utf-8")
            written.append(file)
        runner.run(client.aclose())
    return written


class _Pages:
    """The pages of a bundle and the names of their files."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.files = [(scope.start, INDEX)]
        """The address and the file's name of each page that is linked so far."""
        self._names = {scope.start: INDEX}

    def link(self, address: str) -> str | None:
        """Return the link to a page of the bundle, or ``None`` if it does not have the page."""
        parts = urlsplit(address)
        page = self._scope.page(parts.path, dict(parse_qsl(parts.query)))
        if page is None:
            return None
        if page not in self._names:
            self._names[page] = self._new_name(page)
            self.files.append((page, self._names[page]))
        return self._names[page] + (f"#{parts.fragment}" if parts.fragment else "")

    def _new_name(self, page: str) -> str:
        """Return a name that no other file has, upper and lower case being the same."""
        stem = re.sub(r"[^A-Za-z0-9_.]+", "-", unquote_plus(page)).strip("-.")[:_NAME]
        taken = {name.casefold() for name in self._names.values()}
        name, number = f"{stem}.html", 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem}-{number}.html"
        return name


class _Page(HTMLParser):
    """The parser of a page that writes what a file of a bundle has of it."""

    def __init__(self, fetch: Callable[[str], str], link: Callable[[str], str | None]) -> None:
        super().__init__(convert_charrefs=False)
        self._fetch = fetch
        self._link = link
        self._out: list[str] = []
        self._left_out: tuple[str, int] | None = None
        """The name of the element that is left out, and how many of that name are open."""
        self._fold: str | None = None
        """The address of the part behind the button that is open."""

    def made_of(self, text: str) -> str:
        """Return the file's text."""
        self.feed(text)
        self.close()
        return "".join(self._out)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._left_out is not None:
            name, depth = self._left_out
            self._left_out = name, depth + (tag == name)
            return
        given = {name: value or "" for name, value in attrs}
        if "data-server" in given or (tag == "form" and given.get("method") != "dialog"):
            self._left_out = tag, 1
        elif given.get("hx-trigger") in ("load", "revealed"):
            self._left_out = tag, 1
            self._out.append(self._part(given["hx-get"]))
        elif tag == "button" and "hx-get" in given:
            self._fold = given["hx-get"]
            self._out.append('<details class="part"><summary>')
        else:
            self._out.append(self._open(tag, given, ">"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._left_out is None:
            self._out.append(self._open(tag, {name: of or "" for name, of in attrs}, "/>"))

    def handle_endtag(self, tag: str) -> None:
        if self._left_out is not None:
            name, depth = self._left_out
            left = depth - (tag == name)
            self._left_out = (name, left) if left else None
        elif tag == "button" and self._fold is not None:
            part, self._fold = self._part(self._fold), None
            self._out.append(f'</summary><div class="slot">{part}</div></details>')
        else:
            self._keep(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self._keep(data)

    def handle_entityref(self, name: str) -> None:
        self._keep(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self._keep(f"&#{name};")

    def handle_decl(self, decl: str) -> None:
        self._keep(f"<!{decl}>")

    def _keep(self, text: str) -> None:
        if self._left_out is None:
            self._out.append(text)

    def _part(self, address: str) -> str:
        """Return the part at an address; all turns that are left come at once."""
        more = f"&count={PART}" if "/turns?" in address else ""
        return _Page(self._fetch, self._link).made_of(self._fetch(address + more))

    def _open(self, tag: str, given: Mapping[str, str], end: str) -> str:
        kept = []
        for name, value in given.items():
            if name.startswith(("hx-", "data-live")):
                continue
            at: str | None = value
            if name in ("href", "src") and value.startswith("/"):
                at = value[1:] if value.startswith("/static/") else self._link(value)
            if at is not None:
                kept.append(f' {name}="{escape(at)}"')
        return f"<{tag}{''.join(kept)}{end}"
