"""Requests of plain text turns in every dialect that has a conversation."""

from __future__ import annotations

from typing import Any, Final

import httpx

SYSTEM: Final = "You call a tool in code."
DIALECTS: Final = ("chat", "messages", "responses", "google")
Turns = list[tuple[str, str]]
"""Roles, ``user`` or ``assistant``, and texts."""


def ask(url: str, dialect: str, turns: Turns, *, stream: bool = False, system: str = SYSTEM) -> int:
    """Ask in one of the dialects, read the reply to its end, and return its HTTP status."""
    path = {"chat": "v1/chat/completions", "messages": "v1/messages", "responses": "v1/responses"}
    said = [{"role": role, "content": text} for role, text in turns]
    body: dict[str, Any] = {"model": "m", "stream": stream}
    if dialect == "chat":
        body["messages"] = [{"role": "system", "content": system}, *said]
    elif dialect == "messages":
        body |= {"system": system, "messages": said, "max_tokens": 100}
    elif dialect == "responses":
        body |= {"instructions": system, "input": said}
    else:
        roles = {"user": "user", "assistant": "model"}
        body = {
            "systemInstruction": {"parts": [{"text": system}]},
            "contents": [{"role": roles[role], "parts": [{"text": t}]} for role, t in turns],
        }
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    to = path.get(dialect, f"v1beta/models/m:{verb}")
    return httpx.post(f"{url}/{to}", json=body, timeout=30).status_code
