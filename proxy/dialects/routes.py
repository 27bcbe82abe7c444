"""The data routes: the paths of all dialects, read once per path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from bridle.proxy.dialects.dialect import Action, ApiPath, Dialect
from bridle.proxy.wire.canonical import ApiError

_SESSION: Final = "/s/"


class Route(NamedTuple):
    """The data route of a request."""

    dialect: Dialect
    at: ApiPath
    session: str | None
    """The session in the path, by id or name."""
    parameters: tuple[tuple[str, str], ...]


class Routes:
    """The routes of the dialects that a proxy serves."""

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        """Build the table.

        The first of the dialects that takes a request to a path gets it, and the last one's errors
        are sent for paths that are no dialect's.
        """
        self._dialects = tuple(dialects)
        self._table = [(d, at, re.compile(at.pattern)) for d in self._dialects for at in d.paths]
        # All calls of a session come by one path, which may be long.
        self._at = lru_cache(maxsize=256)(self._read)

    def find(self, path: str, method: str, headers: Mapping[str, str]) -> Route | None:
        """Return the data route of a request, or ``None`` for any other path.

        The route may not permit the method.
        """
        for route in self._at(path):
            takes = route.at.takes
            if takes is None or takes(method, headers):
                return None if route.at.action is Action.NOTHING else route
        return None

    def nothing_at(self, path: str) -> ApiError:
        return nothing_at(path, self._correction(path))

    def dialect_of(self, path: str) -> Dialect:
        """Return the dialect of the error for a path that is no route."""
        for dialect in self._dialects:
            if dialect.misplaced is not None and dialect.misplaced.search(path):
                return dialect
        return self._dialects[-1]

    def _read(self, path: str) -> tuple[Route, ...]:
        session = None
        if path.startswith(_SESSION):
            session, _, path = path[len(_SESSION) :].partition("/")
            session, path = unquote(session), f"/{path}"
            if not session:
                return ()
        routes = []
        for dialect, at, pattern in self._table:
            if (match := pattern.fullmatch(path)) is not None:
                parameters = tuple(match.groupdict().items())
                routes.append(Route(dialect, at, session, parameters))
        return tuple(routes)

    def _correction(self, path: str) -> str | None:
        """Return the correction of the client's base URL.

        There is one if ``path`` with or without ``/v1`` is a route.
        """
        session, rest = "", path
        if path.startswith(_SESSION):
            name, _, rest = path[len(_SESSION) :].partition("/")
            session, rest = f"{_SESSION}{name}", f"/{rest}"
        if rest.startswith("/v1/") and self._is_route(session + rest.removeprefix("/v1")):
            return "leave /v1 out of the base URL, this client adds it"
        if self._is_route(f"{session}/v1{rest}"):
            return "end the base URL in /v1, this client does not add it"
        return None

    def _is_route(self, path: str) -> bool:
        paths = [route.at for route in self._at(path) if route.at.takes is None]
        return bool(paths) and paths[0].action is not Action.NOTHING


def nothing_at(path: str, correction: str | None = None) -> ApiError:
    message = f"nothing is served at {path}" + (f": {correction}" if correction else "")
    return ApiError("not_found", message, status=404)
