"""The redaction of secrets in the stored text of a call.

It covers bodies, headers, messages, and the columns that quote them. It is off by default, because
redacted bodies are not byte for byte those that were sent. It searches the decoded text of each
JSON string, and each line that is not JSON. The library detect-secrets finds the secrets that it
knows, :data:`PATTERNS` and :data:`READERS` the others.

Token ids are never changed, because they must stay those that were sampled; a secret that the model
itself read or wrote is still in them. A streamed reply may split a secret across its events, where
no pattern matches, even if its last events show it whole. If a reply holds a secret, its stream is
therefore not kept, nor is any body that does not show the secret.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from bridle.errors import BridleError
from bridle.extras import missing_extra
from bridle.store.call import CallBegun, CallEnded
from bridle.store.records import Message, Note, SessionRecord
from bridle.store.writing.batch import Patch, Record

Finder = Callable[[str], Iterable[tuple[int, int]]]
"""A function that returns the places of secrets in a text, as starts and ends in order. Its cost is
proportional to the length of any text, however much that repeats."""


class DetectorsMissing(BridleError, ImportError):
    """The library that finds secrets is not installed."""


def _word(beginning: str) -> str:
    """Return a pattern of a word's beginning.

    It also matches in JSON within a text, where the escaped line break before the word ends in a
    letter.
    """
    before = (r"\b", r"\\[bfnrt]", r"\\u[0-9A-Fa-f]{4}")
    # Looked for behind the beginning, which can be searched for as it is.
    return beginning + "(?:" + "|".join(f"(?<={one}{beginning})" for one in before) + ")"


PATTERNS: Final[Mapping[str, str]] = {
    "bearer_token": r"(?i:\bbearer )(?P<secret>[A-Za-z0-9._~+/=-]{16,})",
    "github_fine_token": _word("g") + r"ithub_pat_[A-Za-z0-9_]{50,}",
    "google_api_key": _word("AIza") + r"[0-9A-Za-z_-]{35}",
    "hugging_face_token": _word("hf_") + r"[A-Za-z0-9]{30,}",
    "session_key": _word("br") + r"[kv]_[A-Za-z0-9_.-]{43,}",
    "api_key": _word("sk-") + r"[A-Za-z0-9_-]{20,}",
    "npm_token": r"/:_authToken=\s*(?P<secret>npm_[^\s\"]+|[A-Fa-f0-9-]{36})",
}
"""Names and regular expressions of the secrets that are searched for beside the library's. If there
is a group ``secret``, only this group is redacted."""

LIBRARY: Final[Mapping[str, str]] = {
    "aws_access_key": "aws.AWSKeyDetector",
    "azure_storage_key": "azure_storage_key.AzureStorageKeyDetector",
    "discord_token": "discord.DiscordBotTokenDetector",
    "github_token": "github_token.GitHubTokenDetector",
    "gitlab_token": "gitlab_token.GitLabTokenDetector",
    "pypi_token": "pypi_token.PypiTokenDetector",
    "sendgrid_key": "sendgrid.SendGridDetector",
    "slack_token": "slack.SlackDetector",
    "square_token": "square_oauth.SquareOAuthDetector",
    "stripe_key": "stripe.StripeDetector",
    # The last: it would take a token that is used as a password for one.
    "password_in_url": "basic_auth.BasicAuthDetector",
}
"""The names of secrets, and detect-secrets' plugins for them."""

_GROUPED: Final = frozenset({"aws_access_key", "password_in_url"})
"""Names of the library's secrets whose pattern has the secret in a group, and also matches the text
around it."""
_SHORTEST: Final = 8
"""Minimum characters of a secret. For a password in a URL, the text around it counts."""
_EVERYWHERE: Final = 64
"""Maximum different secrets of a kind in a text that are redacted wherever they occur again,
also without the text that identified them. If there are more, each is redacted only where it was
found."""
_LITERAL: Final = re.compile(rb'"((?:[^"\\]|\\.)*)(?:(")|\\?\Z)', re.DOTALL)
"""A JSON string, or the rest of a text from an unclosed quote on. Such a rest is matched as a
whole, because trying each further quote in it would take time that is quadratic in its length."""
_STREAM: Final = (b"data:", b"event:", b"id:", b":")
"""The prefixes of a stream of events."""


class Redactor:
    """A redactor that replaces every secret with ``[redacted:NAME]``.

    It adds a note on that to the call.
    """

    def __init__(self) -> None:
        """Make a redactor. Raise :class:`DetectorsMissing` if the library is missing."""
        own = {name: _pattern(text) for name, text in PATTERNS.items()}
        self._finders = {**READERS, **own, **{name: _library(name) for name in LIBRARY}}
        self._requests: dict[str, Counter[str]] = {}
        """The numbers of secrets by name in the requests of open calls, by call."""

    def scrubbed(self, record: Record) -> Record:
        """Return ``record``, without secrets if it is a call's or has the command of a session.

        The beginning of a call must come before its end.
        """
        match record:
            case CallBegun():
                return self.begun(record)
            case CallEnded():
                return self.ended(record)
            case SessionRecord(argv=tuple()):
                return replace(record, argv=self._scrub_argv(record.argv))
            case Patch(fields={"argv": argv}):
                return replace(record, fields={**record.fields, "argv": self._scrub_argv(argv)})
        return record

    def _scrub_argv(self, argv: Sequence[str] | None) -> tuple[str, ...]:
        return tuple(self._scrub_text(one, Counter()) for one in argv or ())

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
        return replace(
            begun,
            request_body=body,
            repeats=None,
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
        return replace(
            ended,
            response_body=body,
            replies=replies,
            error=error,
            sampling=sampling,
            role=role,
            notes=(*notes, Note("redacted", detail)),
        )

    def _scrub(self, data: bytes, found: Counter[str]) -> bytes:
        """Redact the decoded JSON strings, then the text around them, line by line."""

        def literal(match: re.Match[bytes]) -> bytes:
            if len(match[1]) < _SHORTEST or match[2] is None:
                return match[0]
            try:
                text = json.loads(match[0], strict=False)
            except ValueError:  # no JSON: the line is looked through as it is
                return match[0]
            scrubbed = self._scrub_text(text, found)
            return match[0] if scrubbed == text else json.dumps(scrubbed).encode()

        lines = data.split(b"\n")
        for number, line in enumerate(lines):
            if len(line) >= _SHORTEST:
                scrubbed = _LITERAL.sub(literal, line)
                around = _LITERAL.sub(lambda match: (match[2] and b'""') or match[0], scrubbed)
                if len(around) >= _SHORTEST and self._holds(around.decode(errors="replace")):
                    text = scrubbed.decode(errors="surrogateescape")
                    scrubbed = self._scrub_text(text, found).encode(errors="surrogateescape")
                lines[number] = scrubbed
        return b"\n".join(lines)

    def _holds(self, text: str) -> bool:
        return any(next(iter(find(text)), None) for find in self._finders.values())

    def _scrub_text(self, text: str, found: Counter[str]) -> str:
        if len(text) < _SHORTEST:
            return text
        for name, find in self._finders.items():
            places = list(find(text))
            secrets = {text[start:end] for start, end in places} - {""}
            shown = f"[redacted:{name}]"
            if len(secrets) > _EVERYWHERE:
                found[name] += len(places)
                text = _replaced(text, places, shown)
                continue
            for secret in sorted(secrets, key=len, reverse=True):
                found[name] += text.count(secret)
                text = text.replace(secret, shown)
        return text

    def _scrub_json(self, value: Mapping[str, Any], found: Counter[str]) -> Mapping[str, Any]:
        scrubbed: dict[str, Any] = self._scrub_as(value, dict[str, Any], found)
        return scrubbed

    def _scrub_messages(
        self, messages: tuple[Message, ...], found: Counter[str]
    ) -> tuple[Message, ...]:
        scrubbed: tuple[Message, ...] = self._scrub_as(messages, tuple[Message, ...], found)
        return scrubbed

    def _scrub_as(self, value: Any, kind: Any, found: Counter[str]) -> Any:
        """Return ``value`` without secrets, decoded as ``kind`` if it had some."""
        data = msgspec.json.encode(value)
        scrubbed = self._scrub(data, found)
        return value if scrubbed == data else msgspec.json.decode(scrubbed, type=kind)


def _pattern(text: str) -> Finder:
    """Return a finder for a regular expression."""
    pattern = re.compile(text, re.DOTALL)
    group = "secret" if "secret" in pattern.groupindex else 0

    def find(text: str) -> Iterable[tuple[int, int]]:
        return [match.span(group) for match in pattern.finditer(text)]

    return find


_KEY_MARKS: Final = re.compile(r'-----(BEGIN|END) [A-Z ]*PRIVATE KEY-----|"')
_TOKEN_BEGINS: Final = re.compile(_word("eyJ") + "[A-Za-z0-9_-]{10}")
_DOTTED: Final = re.compile(r"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+){2,}")


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of private keys, from the first BEGIN mark of each to its END mark.

    A key does not reach beyond a JSON string that it begins in.
    """
    start = None
    for mark in _KEY_MARKS.finditer(text):
        if mark[1] is None:
            start = None
        elif mark[1] == "BEGIN":
            start = mark.start() if start is None else start
        elif start is not None:
            yield start, mark.end()
            start = None


def _web_tokens(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of JSON web tokens.

    A token is three words with dots between them, the first two of which begin as a JSON object
    does.
    """
    for run in _DOTTED.finditer(text):
        ends = [run.start() + at.start() for at in re.finditer(r"\.|\Z", run[0])]
        at = run.start()
        for first, second, third in zip(ends, ends[1:], ends[2:], strict=False):
            signed = text.startswith("eyJ", first + 1) and second - first > 13
            begins = _TOKEN_BEGINS.search(text, at, first) if signed else None
            if begins is not None and third - second > 10:
                yield begins.start(), third
                at = third
            else:
                at = max(at, first + 1)


READERS: Final[Mapping[str, Finder]] = {
    "private_key": _private_keys,
    "json_web_token": _web_tokens,
}
"""Functions that find secrets, by the names of the secrets. They are used where a regular
expression would search the same text again from each place where a secret might begin."""


def _replaced(text: str, places: Iterable[tuple[int, int]], shown: str) -> str:
    pieces, at = [], 0
    for start, end in places:
        if start >= at:
            pieces += [text[at:start], shown]
            at = end
    return "".join((*pieces, text[at:]))


def _library(name: str) -> Finder:
    """Return a finder for a plugin of detect-secrets.

    Only the plugin's regular expressions are used, because the plugin itself returns a group of the
    match, which may be no more than a token's prefix.
    """
    module, _, plugin = LIBRARY[name].partition(".")
    try:
        found = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), plugin)
    except ImportError as error:
        message = missing_extra("redact=true needs the extra redact", "redact", error)
        raise DetectorsMissing(message) from error
    group = 1 if name in _GROUPED else 0
    patterns = [(each, min(group, each.groups)) for each in found().denylist]

    def find(text: str) -> Iterable[tuple[int, int]]:
        found = [match.span(at) for pattern, at in patterns for match in pattern.finditer(text)]
        return found if len(patterns) == 1 else sorted(found)

    return find
