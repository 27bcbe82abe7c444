"""The table of data routes, read once per path."""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from bridle.proxy.wire.canonical import ApiError, DialectName


class Action(Enum):
    GENERATE = auto()
    COUNT = auto()
    MODELS = auto()
    HELLO = auto()
    STORED = auto()
    """A stored response: read or deleted."""


class Route(NamedTuple):
    """The data route of a request."""

    dialect: DialectName
    action: Action
    method: str
    """The permitted method, or several with commas between."""
    session: str | None = None
    """The session in the path, by id or name."""
    parameters: tuple[tuple[str, str], ...] = ()


_EXACT: Final = {
    "/v1/chat/completions": Route("chat", Action.GENERATE, "POST"),
    "/v1/completions": Route("completions", Action.GENERATE, "POST"),
    "/v1/responses": Route("responses", Action.GENERATE, "POST"),
    "/v1/messages": Route("messages", Action.GENERATE, "POST"),
    "/v1/messages/count_tokens": Route("messages", Action.COUNT, "POST"),
    "/v1/models": Route("chat", Action.MODELS, "GET"),
    "/v1beta/models": Route("google", Action.MODELS, "GET"),
    "/v1alpha/models": Route("google", Action.MODELS, "GET"),
    "/api/hello": Route("messages", Action.HELLO, "HEAD"),
}
_GOOGLE: Final = re.compile(r"/v1(?:beta|alpha)?/models/(?P<model>.+):(?P<method>\w+)")
_GOOGLE_ACTIONS: Final = {
    "generateContent": Action.GENERATE,
    "streamGenerateContent": Action.GENERATE,
    "countTokens": Action.COUNT,
}
_STORED: Final = re.compile(r"/v1/responses/(?!(?:compact|input_tokens)$)(?P<response>[^/]+)")
"""The excluded names are OpenAI routes that are not served; they are no response ids."""
_MODEL: Final = re.compile(r"/(?P<version>v1|v1beta|v1alpha)/models/(?P<model>.+)")
_GOOGLE_METHOD: Final = re.compile(r"[a-z]+(?:[A-Z][a-z]+)+")
"""Google's method names (``embedContent``); no model tag (``qwen3:8b``) has this form."""
_SESSION: Final = "/s/"


@lru_cache(maxsize=256)  # all calls of a session come by one path, which may be long
def route(path: str) -> Route | None:
    """Return the data route of ``path``, or ``None`` for any other path."""
    session = None
    if path.startswith(_SESSION):
        session, _, path = path[len(_SESSION) :].partition("/")
        session, path = unquote(session), f"/{path}"
        if not session:
            return None
    found = _EXACT.get(path) or _parametrised(path)
    if found is None or session is None:
        return found
    return Route(found.dialect, found.action, found.method, session, found.parameters)


def _parametrised(path: str) -> Route | None:
    google = _GOOGLE.fullmatch(path)
    if google is not None and _GOOGLE_METHOD.fullmatch(google["method"]):
        action = _GOOGLE_ACTIONS.get(google["method"])
        if action is None:
            return None
        return Route("google", action, "POST", None, tuple(google.groupdict().items()))
    model = _MODEL.fullmatch(path)
    if model is not None:
        dialect: DialectName = "chat" if model["version"] == "v1" else "google"
        return Route(dialect, Action.MODELS, "GET", None, (("model", model["model"]),))
    stored = _STORED.fullmatch(path)
    if stored is not None:
        return Route(
            "responses", Action.STORED, "GET, DELETE", None, (("response", stored["response"]),)
        )
    return None


def nothing_at(path: str) -> ApiError:
    """Return the error for a path that is no route."""
    why = _misplaced(path)
    message = f"nothing is served at {path}" + (f": {why}" if why else "")
    return ApiError("not_found", message, status=404)


def calls_method(path: str) -> bool:
    """Return whether a POST to ``path`` calls a method of a model in Google's form. In a GET the
    same path may name a model with a tag."""
    return _GOOGLE.search(path) is not None


def _misplaced(path: str) -> str | None:
    """Return the correction of the client's base URL, if ``path`` with or without ``/v1`` is a
    route."""
    session, rest = "", path
    if path.startswith(_SESSION):
        name, _, rest = path[len(_SESSION) :].partition("/")
        session, rest = f"{_SESSION}{name}", f"/{rest}"
    if rest.startswith("/v1/") and route(session + rest.removeprefix("/v1")) is not None:
        return "leave /v1 out of the base URL, this client adds it"
    if route(f"{session}/v1{rest}") is not None:
        return "end the base URL in /v1, this client does not add it"
    return None


def implied_dialect(path: str) -> DialectName:
    """Return the dialect of the error for an unknown path."""
    if "/v1beta/" in path or "/v1alpha/" in path or _GOOGLE.search(path):
        return "google"
    if "/messages" in path or "/api/" in path:
        return "messages"
    if "/responses" in path:
        return "responses"
    return "chat"
