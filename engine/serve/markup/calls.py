"""The parts that grammars share.

They are the numbering of a reply's calls, and a reader of JSON objects as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from bridle.engine.serve.deltas import Content, Delta, ToolArguments, ToolName
from bridle.engine.serve.markup.reading import BracketScanner, content

_KEYS: Final = ("arguments", "parameters")
_ENVELOPE: Final = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"[^"\\]*+(?:\\.[^"\\]*+)*+")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_FIRST_KEY: Final = re.compile(r'\s*\{\s*"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_LONGEST_HEAD: Final = 1024
"""Characters from which on a body that is no call yet is judged when it is whole. Judged anew with
each piece, a name that does not end would take the square of its length."""
_CALL_KEYS: Final = frozenset(("name", "id", "type", "tool_call_id", *_KEYS))
_NAME: Final = re.compile(r"\s*[\w.:/-]+\s*")


class Calls:
    """The calls of one reply, in order; ``tools`` are the request's."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._index = -1
        self._schemas = {
            function["name"]: function.get("parameters")
            for tool in tools
            if isinstance(function := tool.get("function"), Mapping)
            and isinstance(function.get("name"), str)
        }

    def begin(self, name: str, id: str | None = None) -> ToolName:
        """Begin a call; ``id`` is the one that the model has given to it, if any."""
        self._index += 1
        return ToolName(self._index, name, id)

    def arguments(self, text: str) -> Iterable[Delta]:
        return (ToolArguments(self._index, text),) if text else ()

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON types, perhaps none, that a tool's schema names for a parameter."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return _types(properties.get(parameter)) if isinstance(properties, Mapping) else frozenset()


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    found = {each for each in _listed(named) if isinstance(each, str)}
    for option in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        found |= _types(option)
    options = _listed(schema.get("enum"))
    if not found and options and all(isinstance(each, str) for each in options):
        return frozenset(("string",))
    return frozenset(found)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def is_name(text: str) -> bool:
    """Return whether ``text`` may be the name of a tool."""
    return _NAME.fullmatch(text) is not None


class JsonCall:
    """A call that is written as ``{"name": …, "arguments": {…}}``.

    The name is emitted when the arguments' object opens, then the arguments as they arrive, in the
    model's own text. A body in another order of keys becomes a call when it is complete. Any other
    body is emitted as content, between ``before`` and the text that is passed to :meth:`end`.
    """

    def __init__(self, calls: Calls, before: str = "") -> None:
        self.shown: bool | None = None
        """True if it is a call; ``None`` while that is not known."""
        self._calls = calls
        self._before = before
        self._body = ""
        """The text so far; kept only until it is known whether it is a call."""
        self._arguments = BracketScanner()

    def push(self, text: str) -> Iterable[Delta]:
        if self.shown is None:
            self._body += text
            if len(self._body) - len(text) > _LONGEST_HEAD:
                return
            envelope = _ENVELOPE.match(self._body)
            name = parsed(envelope["name"]) if envelope else None
            if envelope is not None and is_text(name):
                self.shown, text = True, self._body[envelope.end() :]
                yield self._calls.begin(name)
            elif self._is_no_call():
                self.shown, text = False, self._before + self._body
            else:
                return
        if self.shown:
            yield from self._calls.arguments(self._arguments.push(text))
        else:
            yield from content(text)

    def end(self, after: str = "") -> Iterable[Delta]:
        if self.shown is None:
            found = _whole_call(self._body)
            self.shown = found is not None
            if found is None:
                yield Content(self._before + self._body + after)
                return
            name, arguments = found
            yield self._calls.begin(name)
            yield from self._calls.arguments(arguments)
        elif not self.shown:
            yield from content(after)

    def _is_no_call(self) -> bool:
        started = self._body.lstrip()
        if started and not started.startswith("{"):
            return True
        key = _FIRST_KEY.match(self._body)
        return key is not None and key[1] not in _CALL_KEYS


def _whole_call(body: str) -> tuple[str, str] | None:
    """Return name and arguments of a body in any key order, or ``None`` if it is not a call."""
    found = parsed(body)
    if not isinstance(found, dict) or not is_text(found.get("name")):
        return None
    arguments = next((found[key] for key in _KEYS if key in found), None)
    if isinstance(arguments, str) and isinstance(parsed(arguments), dict):
        return (found["name"], arguments) if is_text(arguments) else None
    if not isinstance(arguments, dict):
        return None
    return found["name"], written(arguments)


def written(value: Any) -> str:
    """Return JSON text that UTF-8 can carry."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_text(text) else json.dumps(value)


def parsed(text: str) -> Any:
    """Return parsed JSON, or ``None`` if ``text`` is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether ``value`` is a non-empty string that UTF-8 can carry.

    JSON escapes can spell lone surrogates, which it cannot carry.
    """
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
