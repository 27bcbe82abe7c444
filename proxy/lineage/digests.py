"""What a message says, whatever way a harness happened to write it down.

A :class:`Unit` is one step of a conversation: a message, a run of tool results that answer one
assistant turn (in any order), or an assistant turn that was split over several messages. Its
*digest* is equal for every rewrite that harnesses make without meaning anything by it: reasoning
dropped or renamed, arguments serialised again, white space at line ends, content as ``null``, text
or blocks, ``cache_control`` marks, other call ids, tool calls folded into text, Claude Code's
changing billing block. Its *form* is equal only for the same message written the same way.

Hashing is linear in the request; a bounded cache keeps normalising linear in what is new.
"""

from __future__ import annotations

import ast
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import orjson

from bridle.proxy.wire.canonical import Message, Role, ToolCall
from bridle.proxy.wire.minting import call_ids

BILLING_MARK = "x-anthropic-billing-header"
"""Claude Code's first system block starts so and carries a hash that changes on every call."""

FOLDED_CALLS = "Calling tools:"
"""How smolagents introduces the Python literal that it writes tool calls as."""

_FOLDED_LONGEST = 262_144
_ENCODER = msgspec.msgpack.Encoder()
_THOUGHTS = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


class Unit(msgspec.Struct, frozen=True, gc=False):
    """One step of a conversation."""

    role: Role
    digest: bytes
    """16 bytes: what it says."""
    form: bytes
    """16 bytes: how it is written."""
    start: int
    end: int
    """The messages it covers: ``messages[start:end]``."""
    message: Message | None = None
    """The assistant turn in one piece, tool calls unfolded; ``None`` for other roles."""
    minted: tuple[str, ...] = ()
    """Call ids read from the opaque values that came with it, in order."""


class _Known(msgspec.Struct, frozen=True, gc=False):
    """What has been found out about a message written in a certain way."""

    digest: bytes
    minted: tuple[str, ...]
    folded: bool


class Digester:
    """Cuts conversations into units; remembers what it found out about messages it has seen."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def units(self, messages: Sequence[Message], first: int = 0) -> tuple[Unit, ...]:
        """The units of ``messages[first:]``, in order."""
        units: list[Unit] = []
        calls: Sequence[ToolCall] = ()
        position = first
        while position < len(messages):
            message = messages[position]
            if message.role == "assistant":
                unit = self._assistant(messages, position)
                calls = unit.message.tool_calls if unit.message is not None else ()
            elif message.role == "tool":
                unit = self._tool_results(messages, position, calls)
            else:
                form = form_of(message)
                known = self._look_up(message, form)
                unit = Unit(
                    message.role, known.digest, form, position, position + 1, minted=known.minted
                )
            units.append(unit)
            position = unit.end
        return tuple(units)

    def system(self, messages: Sequence[Message]) -> tuple[bytes, bytes, int]:
        """:func:`system_digest`, remembered by form."""
        form, count = _system_form(messages)
        known = self._known.get(form)
        if known is None:
            known = _Known(_system_meaning(messages[:count]), (), folded=False)
            self._remember(form, known)
        return known.digest, form, count

    def _assistant(self, messages: Sequence[Message], start: int) -> Unit:
        end = start + 1
        form = form_of(messages[start])
        known = self._look_up(messages[start], form)
        message = unfolded(messages[start]) if known.folded else messages[start]
        digest, minted = known.digest, known.minted
        while end < len(messages) and messages[end].role == "assistant":
            following = unfolded(messages[end])
            if not _same_turn(message, minted, following):
                break
            message = _joined(message, following)
            form = form_of(message)
            digest, minted = digest_of(message), _minted(message)
            end += 1
        return Unit("assistant", digest, form, start, end, message=message, minted=minted)

    def _tool_results(
        self, messages: Sequence[Message], start: int, calls: Sequence[ToolCall]
    ) -> Unit:
        answers = {call.id: index for index, call in enumerate(calls)}
        end = start
        forms: list[bytes] = []
        results: list[bytes] = []
        minted: list[str] = []
        while end < len(messages) and messages[end].role == "tool":
            message = messages[end]
            form = form_of(message)
            known = self._look_up(message, form)
            call = answers.get(message.tool_call_id or "", end - start)
            forms.append(form)
            results.append(call.to_bytes(4, "big") + known.digest)
            minted += known.minted
            end += 1
        digest = blake2b(b"".join(sorted(results)), digest_size=16).digest()
        form = forms[0] if len(forms) == 1 else blake2b(b"".join(forms), digest_size=16).digest()
        return Unit("tool", digest, form, start, end, minted=tuple(dict.fromkeys(minted)))

    def _look_up(self, message: Message, form: bytes) -> _Known:
        known = self._known.get(form)
        if known is not None:
            self._known.move_to_end(form)
            return known
        plain = unfolded(message)
        known = _Known(digest_of(plain), _minted(plain), plain is not message)
        self._remember(form, known)
        return known

    def _remember(self, form: bytes, known: _Known) -> None:
        self._known[form] = known
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)


def form_of(message: Message) -> bytes:
    """16 bytes that are equal for messages written the same way, ids and anchors included."""
    return blake2b(_ENCODER.encode(message), digest_size=16).digest()


def digest_of(message: Message) -> bytes:
    """16 bytes that are equal for messages that say the same."""
    said: list[Any] = [message.role, *meaning_parts(message.content)]
    if message.role == "assistant":
        said = [message.role, spoken_text(message)]
        said += [[call.name, meaning_arguments(call.arguments)] for call in message.tool_calls]
    return _hash(said)


def system_digest(messages: Sequence[Message]) -> tuple[bytes, bytes, int]:
    """Digest and form of the leading system messages, and how many they are."""
    form, count = _system_form(messages)
    return _system_meaning(messages[:count]), form, count


def _system_form(messages: Sequence[Message]) -> tuple[bytes, int]:
    count = 0
    while count < len(messages) and messages[count].role == "system":
        count += 1
    forms = b"".join([form_of(message) for message in messages[:count]])
    return blake2b(forms, digest_size=16).digest(), count


def _system_meaning(leading: Sequence[Message]) -> bytes:
    said: list[Any] = []
    for message in leading:
        said += meaning_parts(message.content)
    text = "\n".join([part for part in said if isinstance(part, str)])
    return _hash([text, [part for part in said if not isinstance(part, str)]])


def value_digest(value: Any) -> bytes:
    """16 bytes of a JSON value, blind to key order and to ``cache_control`` marks."""
    encoded = _encoded(value)
    if b'"cache_control"' in encoded:
        encoded = _encoded(_without_cache_marks(value))
    return blake2b(encoded, digest_size=16).digest()


def meaning_text(text: str) -> str:
    """``text`` without white space at its ends, at line ends, and without empty lines."""
    text = text.strip()
    if "\n" not in text:
        return text
    lines = (line.rstrip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def meaning_parts(content: str | list[dict[str, Any]] | None) -> list[Any]:
    """Content as a list of texts and of other parts; neighbouring texts are one."""
    if content is None:
        return []
    if isinstance(content, str):
        whole = meaning_text(_without_billing(content))
        return [whole] if whole else []
    said: list[Any] = []
    for part in content:
        text = part.get("text")
        if part.get("type") not in ("text", "input_text", "output_text") or text is None:
            said.append(_without_cache_marks(part))
            continue
        text = meaning_text(_without_billing(text))
        if said and isinstance(said[-1], str):
            said[-1] = f"{said[-1]}\n{text}" if text else said[-1]
        elif text:
            said.append(text)
    return said


def meaning_arguments(arguments: str) -> Any:
    """Tool-call arguments as a JSON value; text that is not JSON stands for itself."""
    text = arguments.strip()
    if not text:
        return {}
    try:
        value = _decoded(text)
        if isinstance(value, str):
            # Some clients encode twice.
            try:
                inner = _decoded(value)
            except ValueError:
                return value
            value = inner if isinstance(inner, dict) else value
        return _plain_numbers(value)
    except (ValueError, RecursionError):
        return text


def _decoded(text: str) -> Any:
    """The JSON value, or what Python's own parser makes of what strict ones refuse: an agent
    written in Python takes raw control characters and ``NaN``, and writes them down in its way.

    Raises ``ValueError`` or ``RecursionError``.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text, strict=False, parse_constant=str)


def spoken_text(message: Message) -> str:
    """What an assistant said aloud: its text without thoughts written into it."""
    texts = [part for part in meaning_parts(message.content) if isinstance(part, str)]
    text = "\n".join(texts)
    if text.startswith("<think>"):
        text = _THOUGHTS.sub("", text, count=1).strip()
    return text


def unfolded(message: Message) -> Message:
    """An assistant message with tool calls that were written into its text as calls again."""
    if message.tool_calls or message.role != "assistant":
        return message
    if isinstance(message.content, str) and FOLDED_CALLS not in message.content:
        return message
    text = "\n".join(part for part in meaning_parts(message.content) if isinstance(part, str))
    before, mark, literal = text.rpartition(FOLDED_CALLS)
    if not mark or len(literal) > _FOLDED_LONGEST:
        return message
    try:
        calls = tuple(_folded_call(call) for call in ast.literal_eval(literal.strip()))
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return message
    return msgspec.structs.replace(message, content=before.strip() or None, tool_calls=calls)


def _folded_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    return ToolCall(id=str(call.get("id", "")), name=str(function["name"]), arguments=arguments)


def _minted(message: Message) -> tuple[str, ...]:
    values = [*message.anchors, *(call.id for call in message.tool_calls)]
    if message.tool_call_id is not None:
        values.append(message.tool_call_id)
    return call_ids(values) if values else ()


def _same_turn(message: Message, minted: tuple[str, ...], following: Message) -> bool:
    """Whether two neighbouring assistant messages are pieces of one reply."""
    next_minted = _minted(following)
    if minted and next_minted:
        return minted == next_minted
    return not message.tool_calls and bool(following.tool_calls) and not following.content


def _joined(message: Message, following: Message) -> Message:
    texts = [*meaning_parts(message.content), *meaning_parts(following.content)]
    reasoning = [text for text in (message.reasoning, following.reasoning) if text]
    plain = [text for text in texts if isinstance(text, str)]
    return msgspec.structs.replace(
        message,
        content="\n".join(plain) or None,
        reasoning="\n".join(reasoning) or None,
        tool_calls=message.tool_calls + following.tool_calls,
        anchors=message.anchors + following.anchors,
    )


def _without_billing(text: str) -> str:
    if not text.startswith(BILLING_MARK):
        return text
    return text.partition("\n")[2]


def _without_cache_marks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_cache_marks(item) for key, item in value.items() if key != "cache_control"
        }
    if isinstance(value, list | tuple):
        return [_without_cache_marks(item) for item in value]
    return value


def _plain_numbers(value: Any) -> Any:
    """JavaScript writes 1.0 as 1, so whole floats are integers here."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _hash(value: Any) -> bytes:
    return blake2b(_encoded(value), digest_size=16).digest()


def _encoded(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # half a surrogate, or deeper than it writes
        return json.dumps(value, sort_keys=True).encode()
