"""Secrets scrubbed from what is stored of a call as text: bodies, headers, messages, and what its
columns quote of them.

Off unless asked for: the bodies are then not byte for byte what was sent. Token ids stay as they
are, for a changed token would be a lie; a secret that the model itself read or wrote is still in
them. A streamed reply may spell a secret across its events, where no pattern sees it, even if its
last events show it whole: when a reply holds one, the stream is not kept, nor any body that does
not show it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bridle.store.records import CallBegun, CallEnded, Message, Note


def _word(beginning: str) -> str:
    """A pattern of a word's beginning in JSON, where a line break before it ends in a letter."""
    before = (r"\b", r"\\[bfnrt]", r"\\u[0-9A-Fa-f]{4}")
    # Looked for behind the beginning, which can be searched for as it is.
    return beginning + "(?:" + "|".join(f"(?<={one}{beginning})" for one in before) + ")"


PATTERNS: Final[Mapping[str, str]] = {
    # Not beyond the JSON string that it begins in.
    "private_key": r'-----BEGIN [A-Z ]*PRIVATE KEY-----[^"]*?-----END [A-Z ]*PRIVATE KEY-----',
    "aws_access_key": _word("A") + r"(?:KIA|SIA)[0-9A-Z]{16}\b",
    "github_token": _word("g") + r"(?:h[pousr]_[A-Za-z0-9]{36,}|ithub_pat_[A-Za-z0-9_]{50,})",
    "gitlab_token": _word("glpat-") + r"[A-Za-z0-9_-]{20,}",
    "google_api_key": _word("AIza") + r"[0-9A-Za-z_-]{35}",
    "hugging_face_token": _word("hf_") + r"[A-Za-z0-9]{30,}",
    "session_key": _word("brk_") + r"[A-Za-z0-9_-]{43}",
    "slack_token": _word("xox") + r"[abprs]-[A-Za-z0-9-]{10,}",
    "api_key": _word("sk-") + r"[A-Za-z0-9_-]{20,}",
    "json_web_token": (
        _word("eyJ") + r"[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
    ),
}
"""Names and regular expressions of the secrets that are looked for when redaction is on, in JSON as
it is written."""

_STREAM: Final = (b"data:", b"event:", b"id:", b":")
"""How a stream of events begins."""


class Redactor:
    """Replaces every match of its patterns with ``[redacted:NAME]`` and notes that on the call."""

    def __init__(self, patterns: Mapping[str, str] = PATTERNS) -> None:
        """Raises ``re.error`` for a pattern that is none."""
        self._patterns = {
            name: re.compile(pattern.encode(), re.DOTALL) for name, pattern in patterns.items()
        }
        self._requests: dict[str, Counter[str]] = {}
        """What was found in the requests of open calls."""

    def begun(self, begun: CallBegun) -> CallBegun:
        found: Counter[str] = Counter()
        body = self._scrub(begun.request_body, found)
        headers = self._scrub_json(begun.headers, found)
        model = self._scrub_text(begun.model_requested, found)
        conversation = begun.conversation
        if conversation is not None:
            tail = self._scrub_messages(conversation.tail, found)
            tools = self._scrub_as(conversation.tools, tuple[dict[str, Any], ...], found)
            conversation = msgspec.structs.replace(conversation, tail=tail, tools=tools)
        if not found:
            return begun
        self._requests[begun.id] = found
        return msgspec.structs.replace(
            begun,
            request_body=body,
            headers=headers,
            model_requested=model,
            conversation=conversation,
        )

    def ended(self, ended: CallEnded) -> CallEnded:
        found = self._requests.pop(ended.id, Counter())
        said: Counter[str] = Counter()
        replies = self._scrub_messages(ended.replies, said)
        shown: Counter[str] = Counter()
        body = self._scrub(ended.response_body, shown)
        if said.total() > shown.total() or (said and body.startswith(_STREAM)):
            body = b"[redacted: the reply spells a secret across its events]"
        error = self._scrub_json(ended.error, found)
        sampling = self._scrub_json(ended.sampling, found)
        role = None if ended.role is None else self._scrub_text(ended.role, found)
        notes = [Note(note.name, self._scrub_text(note.detail, found)) for note in ended.notes]
        found = found | said | shown
        if not found:
            return ended
        detail = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
        return msgspec.structs.replace(
            ended,
            response_body=body,
            replies=replies,
            error=error,
            sampling=sampling,
            role=role,
            notes=(*notes, Note("redacted", detail)),
        )

    def _scrub(self, data: bytes, found: Counter[str]) -> bytes:
        for name, pattern in self._patterns.items():
            data, count = pattern.subn(b"[redacted:%b]" % name.encode(), data)
            if count:
                found[name] += count
        return data

    def _scrub_text(self, text: str, found: Counter[str]) -> str:
        return self._scrub(text.encode(), found).decode()

    def _scrub_json(self, value: Mapping[str, Any], found: Counter[str]) -> Mapping[str, Any]:
        scrubbed: dict[str, Any] = self._scrub_as(value, dict[str, Any], found)
        return scrubbed

    def _scrub_messages(
        self, messages: tuple[Message, ...], found: Counter[str]
    ) -> tuple[Message, ...]:
        scrubbed: tuple[Message, ...] = self._scrub_as(messages, tuple[Message, ...], found)
        return scrubbed

    def _scrub_as(self, value: Any, kind: Any, found: Counter[str]) -> Any:
        """``value`` without secrets, read as ``kind`` where it had some."""
        data = msgspec.json.encode(value)
        scrubbed = self._scrub(data, found)
        return value if scrubbed == data else msgspec.json.decode(scrubbed, type=kind)
