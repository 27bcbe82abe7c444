"""The form of a session's page, by which a person scores the session or one of its turns.

A form carries the token of the pages that show it, so that no page of another origin can send one:
such a page can read neither the token nor ours. Whoever serves the pages checks the token and
records the reward (:func:`scored`).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

Record = Callable[[str, Mapping[str, str]], Awaitable[None]]
"""A function that records the reward in the fields of a form, for the session with an id."""
_FORM_BYTES: Final = 16 << 10
"""Maximum bytes of a form that is read."""


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """The form of the pages that a request gets."""

    token: str
    near: bool
    """True if the person is on the machine of the server, and may score by one click."""
    record: Record | None = None
    """The function that records, if the server of the pages does it itself."""


async def scored(request: Request, session_id: str, token: str, record: Record) -> Response:
    """Record the reward in a form, and return the way back to the session's page.

    Raise ``HTTPException`` for a form that is too long (413) or has another token (403).
    """
    form = await read_form(request)
    if not hmac.compare_digest(form.get("token", "").encode(), token.encode()):
        raise HTTPException(403, "this form is out of date: open the session's page again")
    await record(session_id, form)
    part = f"#turn-{form['turn']}" if form.get("turn") else ""
    return RedirectResponse(f"{request.app.state.root}/sessions/{session_id}{part}", 303)


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form without the blanks around them, the first of each name.

    Raise ``HTTPException`` (413) for a form that is too long.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _FORM_BYTES:
            raise HTTPException(413, "the form is too long")
    fields = parse_qs(body.decode("utf-8", "replace"))
    return {name: values[0].strip() for name, values in fields.items()}
