"""The recorded conversation in the body of a live request, for an upstream of its own dialect.

Such an upstream gets the client's JSON. In it, each element of the conversation in whose place a
recorded one stands gets the recorded words; the others get the recorded names. The client's marks
for the cache, its limits and all opaque fields stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bridle.proxy.dialects.wording import Wording, filled, scalars
from bridle.proxy.replay.aliases import Aliases

_Key = tuple[Any, ...]


class GraftedBodies:
    """The recorded elements of conversations, by what the harness sends in their place."""

    def __init__(self) -> None:
        self._recorded: dict[_Key, Any] = {}
        self._whole: dict[_Key, Any] = {}
        """Fields with another number of elements, by what is sent."""

    def learn(self, sent: bytes, recorded: bytes, wording: Wording) -> None:
        """Learn from a request and the recorded one in whose place it came."""
        one, other = json.loads(sent), json.loads(recorded)
        for name in wording.conversation:
            mine, theirs = _elements(one.get(name)), _elements(other.get(name))
            if len(mine) != len(theirs):
                self._whole[_key(name, mine)] = other.get(name)
                continue
            for element, then in zip(mine, theirs, strict=True):
                if element != then:
                    self._recorded[_key(name, element)] = then

    def body(self, sent: bytes, aliases: Aliases, wording: Wording) -> bytes | None:
        """Return the body with the recorded words; ``None`` if it has them already."""
        fields = json.loads(sent)
        for name in wording.conversation:
            given = fields.get(name)
            key = _key(name, _elements(given))
            if key in self._whole:
                fields[name] = self._whole[key]
            elif isinstance(given, list):
                fields[name] = [self._element(name, one, aliases, wording) for one in given]
            elif given is not None:
                fields[name] = self._element(name, given, aliases, wording)
        return None if fields == json.loads(sent) else json.dumps(fields).encode()

    def _element(self, name: str, element: Any, aliases: Aliases, wording: Wording) -> Any:
        then = self._recorded.get(_key(name, element))
        if then is None:
            return wording.changed(element, aliases.recorded_arguments, aliases.recorded_text)
        words: list[Any] = list(scalars(then))
        same_shape = len(words) == sum(1 for _ in scalars(element))
        return filled(element, iter(words)) if same_shape else then


def _elements(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _key(name: str, value: Any) -> _Key:
    words: Iterator[Any] = scalars(value)
    return (name, *words)
