"""The comparison of a request with the recorded one in whose place it came.

A difference gets the name of its worst part: ``same``, ``noise`` (equal by the rules below),
``handle`` (the name of something that runs in the background, which ``aliases`` translates),
``place`` (another folder) or ``diverged``. Ids are no difference: both requests have those of the
new session. A rule of noise always needs the words around a number, because a lone number may be
the result of a tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import msgspec

from bridle.proxy.wire.canonical import Message, Request

_DAY: Final = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"

NOISE: Final[Mapping[str, str]] = {
    "chunk_id": r"\bChunk ID: [0-9a-f]+",
    "wall_time": r"(?i)\b(?:wall|elapsed|real|user|sys)(?: time)?:?\s+\d[\d.m]*\s*s(?:ec\w*)?\b",
    "process_group": r"\bProcess Group PGID: \d+",
    "duration": r"(?i)\b(?:in|took|after|duration:?|time:) ~?\d+(?:\.\d+)? ?(?:ms|s|sec|seconds)\b"
    r"|\bduration_ms\W{1,4}\d+",
    "timestamp": r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?",
    "date": rf"\b(?:{_DAY},? )?(?:{_MONTH} +\d{{1,2}}|\d{{1,2}} {_MONTH})\b"
    r"(?:,? \d\d:\d\d(?::\d\d)?)?(?: [A-Z]{3,4})?(?:,? \d{4})?",
    "uuid": r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    "temporary_folder": r"/\w+/[\w.-]*bridle-[\w.-]+",
}
"""The rules of noise: a name, and the text that may differ."""
LISTING_ORDER: Final = "listing_order"
"""The rule that the lines of a text may come in another order."""

_RUNS: Final = "agent|job|process|session|shell|task|thread"
HANDLES: Final = re.compile(
    r"(?i)\b(?:(?:running with )?session ID|with ID|shell ID|Background PIDs?|agentId"
    r"|(?:background )?process(?: id)?(?=:? \(?[a-z_-]*\d)):? \(?[\w-]+"
    rf"|\"(?:(?:{_RUNS})_id|nickname)\": ?\"?[\w-]+"
    rf"|<(?:{_RUNS})(?: id=\"|[-_]id>)[\w-]+"
    r"|\bTask [\w-]+(?= \(type: )|- [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}: [\w-]+"
)
"""A text that names something that runs in the background, such as a sub-agent."""
DISTINCT: Final = re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{8,}")
"""A name of letters and digits, which is one wherever it is, such as in a path."""
_NAME: Final = re.compile(r"[\w-]+$")
_SHOWN: Final = 40
"""Characters of each side of a difference that are shown before and after its beginning."""


class Likeness(IntEnum):
    """The likeness of a request and the recorded one, the best first."""

    SAME = 0
    NOISE = 1
    HANDLE = 2
    PLACE = 3
    DIVERGED = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison."""

    likeness: Likeness = Likeness.SAME
    detail: str = ""
    """The rules of noise, or the first difference."""

    @property
    def follows(self) -> bool:
        """Return whether the recorded reply answers the request too."""
        return self.likeness <= Likeness.NOISE


SAME: Final = Verdict()


@dataclass(frozen=True)
class Judge:
    """The rules of a comparison."""

    noise: Mapping[str, re.Pattern[str]]
    places: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """Folders of the recorded session, each with the new one's if it is another."""

    def request(self, sent: Request, recorded: Request) -> Verdict:
        """Compare two requests, whose call ids must have been made the same."""
        if sent.model != recorded.model:
            detail = f"model: {recorded.model!r} was asked, now {sent.model!r}"
            return Verdict(Likeness.DIVERGED, detail)
        verdicts = [self.text("tools", _json(sent.tools), _json(recorded.tools))]
        if len(sent.messages) != len(recorded.messages):
            detail = f"messages: {len(recorded.messages)} were sent, now {len(sent.messages)}"
            return Verdict(Likeness.DIVERGED, detail)
        for one, other in pairs(sent, recorded):
            verdicts.append(self._message(one, other))
        return _worst(verdicts)

    def text(self, name: str, sent: str, recorded: str) -> Verdict:
        """Compare two texts; ``name`` is what a difference is called."""
        if sent == recorded:
            return SAME
        if sorted(HANDLES.findall(sent)) != sorted(HANDLES.findall(recorded)):
            one, other = _without_handles(sent), _without_handles(recorded)
            rest = SAME if one == other else self._unnamed(name, one, other)
            if not rest.follows:
                return rest
            return Verdict(Likeness.HANDLE, f"{name}: {first_difference(recorded, sent)}")
        return self._unnamed(name, sent, recorded)

    def _unnamed(self, name: str, sent: str, recorded: str) -> Verdict:
        """Compare two texts that have no other handles."""
        one, other, rules = sent, recorded, []
        for rule, pattern in self.noise.items():
            if pattern.findall(one) != pattern.findall(other):
                rules.append(rule)
                one, other = pattern.sub(f"<{rule}>", one), pattern.sub(f"<{rule}>", other)
        if one == other:
            return Verdict(Likeness.NOISE, f"{name}: {', '.join(rules)}")
        if sorted(one.splitlines()) == sorted(other.splitlines()):
            return Verdict(Likeness.NOISE, f"{name}: {', '.join((*rules, LISTING_ORDER))}")
        moved = other
        for before, now in self.places:
            moved = moved.replace(before, now)
        likeness = Likeness.PLACE if one == moved else Likeness.DIVERGED
        return Verdict(likeness, f"{name}: {first_difference(other, one)}")

    def _message(self, sent: Message, recorded: Message) -> Verdict:
        name = f"tool result {recorded.tool_call_id}" if recorded.tool_call_id else recorded.role
        if (sent.role, sent.tool_call_id) != (recorded.role, recorded.tool_call_id):
            was, now = (f"{one.role} {one.tool_call_id or ''}".strip() for one in (recorded, sent))
            return Verdict(Likeness.DIVERGED, f"messages: {was} was sent, now {now}")
        if sent == recorded:
            return SAME
        return self.text(name, _spoken(sent), _spoken(recorded))


def judge(noise: Mapping[str, str], places: Sequence[tuple[str, str]] = ()) -> Judge:
    """Return the judge with the rules above and further ``noise``.

    ``places`` are folders of the recorded session and of the new one. Raise ``ValueError`` for an
    expression that cannot be read, or that a lone number matches.
    """
    patterns: dict[str, re.Pattern[str]] = {}
    for name, expression in {**NOISE, **noise}.items():
        try:
            patterns[name] = pattern = re.compile(expression)
        except re.error as error:
            raise ValueError(f"{name}: {expression!r} is no regular expression: {error}") from error
        if pattern.fullmatch("7") or pattern.fullmatch("1234") or pattern.fullmatch("0.5"):
            raise ValueError(f"{name}: a lone number is no noise; add the words beside it")
    return Judge(patterns, [(was, now) for was, now in places if was != now])


def pairs(sent: Request, recorded: Request) -> Iterator[tuple[Message, Message]]:
    """Yield the messages of a request, each with the recorded one.

    Tool results are found by their call, others by their place.
    """
    results = {m.tool_call_id: m for m in recorded.messages if m.tool_call_id is not None}
    for one, other in zip(sent.messages, recorded.messages, strict=False):
        yield one, results.get(one.tool_call_id, other) if one.tool_call_id else other


def handles(text: str) -> list[str]:
    """Return the names of what runs in the background, in their order."""
    return [found[0] for match in HANDLES.findall(text) if (found := _NAME.search(match))]


def first_difference(recorded: str, now: str) -> str:
    """Return the first difference of two texts, with some text around it."""
    at = next(
        (at for at, (a, b) in enumerate(zip(recorded, now, strict=False)) if a != b),
        min(len(recorded), len(now)),
    )
    start = max(0, at - _SHOWN)
    was, new = (text[start : at + _SHOWN] for text in (recorded, now))
    return f"{was!r} was recorded, now {new!r}"


def _without_handles(text: str) -> str:
    for name in filter(DISTINCT.fullmatch, handles(text)):
        text = text.replace(name, "handle")
    return HANDLES.sub("handle", text)


def _spoken(message: Message) -> str:
    content = message.content or ""
    parts = [content] if isinstance(content, str) else [_part(part) for part in content]
    wrote = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join([*filter(None, [message.reasoning]), *parts, *wrote])


def _part(part: Mapping[str, Any]) -> str:
    return str(part["text"]) if part.get("type") == "text" else _json(part)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst verdict; several kinds of noise are named together."""
    worst = max(verdicts, key=lambda verdict: verdict.likeness)
    if worst.likeness is not Likeness.NOISE:
        return worst
    return Verdict(Likeness.NOISE, "; ".join(v.detail for v in verdicts if v.detail))
