"""The source of the pages' data, and the rendering of a template as a response."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException

from bridle.diagnosis.transcript import lasted
from bridle.errors import UsageError
from bridle.reconstruct.rewards import findings_in, session_rewards
from bridle.reconstruct.session import LoadedSession
from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.viewer import turns
from bridle.viewer.prose import markdown, with_code
from bridle.viewer.scoring import ScoreForm

FOLDER: Final = Path(__file__).parent
_POLICY: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def token_numbers(tokens: Sequence[int]) -> list[str]:
    """Return the ids themselves, as the texts of tokens."""
    return [str(token) for token in tokens]


@dataclass(frozen=True)
class Source:
    """The store from which the pages are made, and how they show it."""

    reader: Reader
    store: str
    """The store's name for people."""
    unknown: turns.TokenTexts = token_numbers
    """The texts of tokens whose texts the store does not have."""
    form: ScoreForm | None = None
    """The form by which a session is scored, if somebody records what it sends."""
    load: Callable[[Reader, str], LoadedSession] = LoadedSession.load
    """The function that reads a session."""
    only: tuple[str, ...] | None = None
    """The ids of the sessions that lists have; ``None`` for all."""

    def texts(self, session: SessionRecord) -> turns.TokenTexts:
        """Return the function from a session's token ids to their texts.

        A vocabulary that is damaged is as if it were missing.
        """
        if session.vocabulary is None:
            return self.unknown
        try:
            return partial(piece_texts, _pieces(self.reader, session.vocabulary))
        except (NotFound, ValueError):
            return self.unknown


def token_texts(tokenizer: Path | None) -> turns.TokenTexts:
    """Return a function from token ids to their texts, by a model directory's tokenizer.

    Without a tokenizer, a text is the id itself.

    Raise :class:`bridle.engine.contract.tokenizer.TokenizerNotRead`.
    """
    if tokenizer is None:
        return token_numbers
    from bridle.engine.contract.tokenizer import Tokenizer

    return partial(piece_texts, Tokenizer(tokenizer).vocabulary())


@lru_cache(maxsize=4)
def _pieces(reader: Reader, digest: str) -> list[bytes]:
    return reader.vocabulary(digest)


def piece_texts(pieces: Sequence[bytes], tokens: Sequence[int]) -> list[str]:
    """Return the texts of successive tokens, whose UTF-8 bytes are ``pieces``.

    A character whose bytes are in several tokens is the text of the last one, and the others show
    their bytes, such as ``\\xc2``. So do bytes that are part of no character.
    """
    texts: list[str] = []
    begun = b""
    for token in tokens:
        if token >= len(pieces):
            texts.append(str(token))
            begun = b""
            continue
        piece = pieces[token]
        known = begun + piece if _goes_on(begun, piece) else piece
        text, used = codecs.utf_8_decode(known, "backslashreplace", False)
        begun = known[used:]
        own = begun[max(0, len(begun) - len(piece)) :]
        texts.append(text + "".join(f"\\x{byte:02x}" for byte in own))
    return texts


def _goes_on(begun: bytes, piece: bytes) -> bool:
    """Return whether ``piece`` has more of the character whose first bytes are ``begun``."""
    try:
        codecs.utf_8_decode(begun + piece, "strict", False)
    except UnicodeDecodeError as error:
        return error.start >= len(begun)
    return True


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "when": lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        "day": lambda at: (
            None if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()
        ),
        "seconds": lasted,
        "by_name": session_rewards,
        "reported": findings_in,
        "figure": lambda value: "–" if value is None else f"{value:,.4g}",
        "count": lambda value: "–" if value is None else f"{value:,}",
        "rich_text": markdown,
        "code": with_code,
        "words": lambda value: str(value).replace("_", " "),
        "pretty": lambda value: orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(),
        "script": lambda value: orjson.dumps(value).decode().replace("<", "\\u003c"),
        "query": lambda values: urlencode({k: v for k, v in values.items() if v not in (None, "")}),
    }
    environment.filters |= filters
    return environment


def render(name: str, request: Request, **values: Any) -> HTMLResponse:
    """Return the page that the template ``name`` makes of ``values``.

    Its links are below the application's ``state.root``. It names the store of the request's
    source, or the application's ``state.store`` if the request got none.
    """
    state = request.app.state
    source: Source | None = getattr(request.state, "source", None)
    store = state.store if source is None else source.store
    template = _templates().get_template(name)
    text = template.render(root=state.root, store=store, path=request.url.path, **values)
    headers = {"content-security-policy": _POLICY, "referrer-policy": "same-origin"}
    return HTMLResponse(text, headers=headers | {"cache-control": "no-store", "vary": "HX-Request"})


def failure(request: Request, error: Exception) -> Response:
    """Return the page with the reason why another page cannot be shown."""
    by_kind: Mapping[type[Exception], int] = {NotFound: 404, UsageError: 422}
    status, message = by_kind.get(type(error), 503), str(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, message = 422, f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers or {}
        missing = f"There is no page at {request.url.path}"
        message = missing if status == 404 else str(error.detail)
    page = render("error.html", request, message=message)
    page.status_code = status
    page.headers.update(headers)
    return page
