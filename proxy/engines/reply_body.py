"""The JSON of an upstream's reply, a chunk or a whole body, as data.

The usual shape (vLLM's, ``engine/contract/contract.py``) is decoded strictly and fast. A payload
that is refused there goes through :class:`OddReply`, which knows the other shapes that upstreams
use, and then through the same strict types. A shape that is recognised is rewritten with a note.
Any other stays as it is, and the strict types refuse it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
import orjson

from bridle.proxy.wire.canonical import ApiError
from bridle.store.records import MISSING_LOGPROB, Note

Json = dict[str, Any]

_TEXTS: Final = ("content", "reasoning", "reasoning_content", "refusal")
_TEXT_PARTS: Final = frozenset({"text", "output_text", "refusal"})
_THINKING_PARTS: Final = frozenset({"thinking", "reasoning", "reasoning_text", "summary_text"})
_PARTS_WITHOUT_TEXT: Final = frozenset({"reference", "redacted_thinking"})
SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""The JSON escape of one half of a surrogate pair."""
_HIGH: Final = ("\ud800", "\udbff")

Entry = TypeVar("Entry")
Index = Annotated[int, msgspec.Meta(ge=0, lt=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(msgspec.Struct, gc=False):
    index: Index | None = None
    id: str | None = None
    function: Function | None = None
    extra_content: Any = None
    thought_signature: Any = None


class Text(msgspec.Struct, gc=False):
    """A streamed ``delta`` or a whole ``message``."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None
    function_call: Function | None = None
    refusal: str | None = None
    reasoning_details: Any = None
    extra_content: Any = None
    audio: Any = None
    images: Any = None

    @property
    def media(self) -> str:
        """Return the names of the parts that are no text, which no client is sent."""
        return ", ".join(name for name in ("audio", "images") if getattr(self, name))

    @property
    def says_anything(self) -> bool:
        return bool(
            self.content
            or self.reasoning
            or self.reasoning_content
            or self.tool_calls
            or self.function_call
            or self.refusal
        )

    @property
    def calls(self) -> Text:
        """Return the calls without the text."""
        return Text(tool_calls=self.tool_calls, function_call=self.function_call)


class LogprobEntry(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, Generic[Entry], gc=False):
    """The logprobs of a choice.

    Chat has entries in ``content``, completions numbers in ``token_logprobs``.
    """

    content: list[Entry] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None

    @property
    def entries(self) -> list[Mapping[str, Any]]:
        """Return the parallel lists of a completion as one entry per token."""
        tokens = self.tokens or []
        tops = self.top_logprobs or []
        return [
            {
                "token": tokens[position] if position < len(tokens) else "",
                "logprob": MISSING_LOGPROB if value is None or not math.isfinite(value) else value,
                "top_logprobs": tops[position] if position < len(tops) else None,
            }
            for position, value in enumerate(self.token_logprobs or ())
        ]


class Choice(msgspec.Struct, Generic[Entry], gc=False):
    index: Index = 0
    delta: Text | None = None
    message: Text | None = None
    text: str | None = None
    logprobs: Logprobs[Entry] | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | str | None = None
    sampling_mask: list[list[TokenId]] | None = None
    """The ids that each of ``token_ids`` was drawn from."""
    routed_experts: str | None = None
    """The experts of the whole choice's positions: the base64 of a ``.npy`` file."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Any = None


class CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class ReasoningTokens(msgspec.Struct, gc=False):
    reasoning_tokens: Count | None = None


class UsageObject(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


class Body(msgspec.Struct, Generic[Entry], gc=False):
    choices: list[Choice[Entry]] | None = None
    usage: UsageObject | None = None
    prompt_token_ids: list[TokenId] | str | None = None
    """The prompt's ids; a text only if the ids were cut out before (``proxy/wire/cut_ids.py``)."""
    error: Any = None
    model: str | None = None
    id: str | None = None
    metrics: Any = None
    """vLLM's figures of the request (``--per-request-spec-decode-metrics``)."""

    @property
    def is_bare(self) -> bool:
        """Return whether it has no content."""
        return not self.choices and self.usage is None and self.prompt_token_ids is None


LeanBody = Body[LogprobEntry]
DetailedBody = Body[msgspec.Raw]
"""A body whose logprob entries stay in the upstream's own bytes, for clients that want to see
them. To make objects of 20,000 of them takes ten times as long."""
OddDetailedBody = Body[dict[str, Any]]
"""A body whose logprob entries had to be normalised."""


class DraftCounts(msgspec.Struct, gc=False):
    num_draft_tokens: Count
    num_accepted_draft_tokens: Count


def draft_counts(metrics: Any) -> DraftCounts | None:
    """Return the counts of speculative decoding in an upstream's ``metrics``, if it has any."""
    given = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    try:
        return None if given is None else msgspec.convert(given, DraftCounts)
    except msgspec.ValidationError:
        return None


def malformed(detail: str) -> ApiError:
    return ApiError("upstream_error", f"the engine sent a malformed reply: {detail}", status=502)


class OddReply:
    """A normaliser for the payloads of one reply, one after another."""

    def __init__(self, notes: dict[Note, None]) -> None:
        """Each normalisation is added to ``notes``."""
        self._notes = notes
        self._held: dict[tuple[Any, ...], str] = {}
        """The first halves of characters whose second halves come with the next chunk, by the place
        of their text."""

    @property
    def holds(self) -> bool:
        """Return whether the next payload must come here, whatever its shape."""
        return bool(self._held)

    def body(self, payload: bytes) -> Json:
        """Return a payload in the usual shape.

        Raises :class:`bridle.proxy.wire.canonical.ApiError` if it is not a JSON object.
        """
        halves = self.holds or SURROGATE.search(payload) is not None
        try:
            given = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise malformed(f"{error}: {payload[:200].decode(errors='replace')}") from error
        if isinstance(given, list) and len(given) == 1:
            (given,) = given
            self._note("reply_in_a_list")
        if not isinstance(given, dict):
            raise malformed(f"{type(given).__name__} instead of an object")
        choices = given.get("choices")
        if isinstance(choices, dict):
            choices = [choices]
            self._note("choices_not_a_list")
        if isinstance(choices, list):
            given["choices"] = [
                self._choice(choice, position)
                for position, choice in enumerate(choices)
                if choice is not None
            ]
        if given.get("usage") is not None:
            given["usage"] = self._usage(given["usage"])
        for name in ("id", "model"):
            given[name] = _as_text(given.get(name))
        return self._without_surrogates(given) if halves else given

    def _choice(self, given: Any, position: int) -> Any:
        if not isinstance(given, dict):
            return given
        choice = {name: value for name, value in given.items() if value is not None}
        choice["index"] = _as_index(choice.get("index", position))
        over = bool(choice.get("finish_reason"))
        if (
            over
            and "message" not in choice
            and any(place[0] == choice["index"] for place in self._held)
        ):
            choice.setdefault("delta", {})
        if not isinstance(choice.get("stop_reason", ""), str | int):
            del choice["stop_reason"]
        for name in ("delta", "message"):
            if name in choice:
                choice[name] = self._text(choice[name], choice["index"], name, over)
        if isinstance(choice.get("text"), str):
            choice["text"] = self._joined((choice["index"], "text"), choice["text"], over)
        if "logprobs" in choice:
            choice["logprobs"] = self._logprobs(choice["logprobs"])
        return choice

    def _text(self, given: Any, choice: Any, name: str, over: bool) -> Any:
        if not isinstance(given, dict):
            return given
        text = {key: value for key, value in given.items() if value is not None}
        self._read_parts(text)
        calls = text.get("tool_calls")
        if isinstance(calls, dict):
            calls = [calls]
        if isinstance(calls, list):
            text["tool_calls"] = [self._tool_call(one) for one in calls if one is not None]
        if isinstance(text.get("function_call"), dict):
            text["function_call"] = self._function(text["function_call"])
        over = over or name == "message"
        for key in _TEXTS:
            place = (choice, key.removesuffix("_content"))
            if isinstance(text.get(key), str):
                text[key] = self._joined(place, text[key], over)
            elif over and place in self._held:
                text[key] = self._joined(place, "", over)
        return text

    def _read_parts(self, text: Json) -> None:
        """Replace each content that is a list of parts with its plain text."""
        for name in _TEXTS:
            value = text.get(name)
            if not isinstance(value, list | dict):
                continue
            said, thought = self._parts(value if isinstance(value, list) else [value])
            self._note(f"{name}_was_a_list")
            if name == "content":
                text["content"] = said
                if thought:
                    text["reasoning"] = f"{text.get('reasoning') or ''}{thought}"
            else:
                text[name] = thought + said

    def _parts(self, parts: Sequence[Any]) -> tuple[str, str]:
        """Return the text and the thoughts of content parts.

        Raises ``ApiError`` for other parts.
        """
        said: list[str] = []
        thought: list[str] = []
        for part in parts:
            if isinstance(part, str):
                said.append(part)
                continue
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _PARTS_WITHOUT_TEXT:
                self._note("content_part_dropped", str(kind))
            elif kind in _THINKING_PARTS:
                inner = part.get(kind, part.get("text", part.get("content", part.get("summary"))))
                thought.append(self._inner(inner, kind))
            elif kind in _TEXT_PARTS or (kind is None and isinstance(part, Mapping)):
                said.append(self._inner(part.get("text", part.get(str(kind))), kind))
            else:
                raise malformed(f"a content part of type {kind!r}")
        return "".join(said), "".join(thought)

    def _inner(self, value: Any, kind: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, list):
            return "".join(self._parts(value))
        raise malformed(f"a content part of type {kind!r} without its text")

    def _tool_call(self, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        call = {name: value for name, value in given.items() if value is not None}
        if "function" not in call and ("name" in call or "arguments" in call):
            call["function"] = {name: call[name] for name in ("name", "arguments") if name in call}
            self._note("tool_call_without_function")
        if isinstance(call.get("function"), dict):
            call["function"] = self._function(call["function"])
        if "index" in call:
            call["index"] = _as_index(call["index"])
        if "id" in call:
            call["id"] = _as_text(call["id"])
        return call

    def _function(self, given: Json) -> Json:
        function = {name: value for name, value in given.items() if value is not None}
        if isinstance(function.get("arguments"), dict):
            self._note("arguments_were_an_object", str(function.get("name") or "")[:64])
            function["arguments"] = _dumped(function["arguments"])
        return function

    def _logprobs(self, given: Any) -> Any:
        """Return logprobs with NaN for each value that is null or not a number."""
        if not isinstance(given, dict):
            return given
        logprobs = {name: value for name, value in given.items() if value is not None}
        if isinstance(logprobs.get("content"), list):
            logprobs["content"] = [_entry(entry) for entry in logprobs["content"]]
        if isinstance(logprobs.get("token_logprobs"), list):
            logprobs["token_logprobs"] = [as_logprob(one) for one in logprobs["token_logprobs"]]
        if isinstance(logprobs.get("tokens"), list):
            logprobs["tokens"] = [_as_text(token) or "" for token in logprobs["tokens"]]
        if isinstance(logprobs.get("top_logprobs"), list):
            logprobs["top_logprobs"] = [_top(top) for top in logprobs["top_logprobs"]]
        return logprobs

    def _usage(self, given: Any) -> Any:
        """Return usage in whole numbers, without the values that are not numbers."""
        if not isinstance(given, Mapping):
            self._note("usage_odd", type(given).__name__)
            return None
        usage: Json = {}
        for name, value in given.items():
            if isinstance(value, Mapping):
                usage[name] = self._usage(value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                self._note("usage_odd", name[:64])
            elif math.isfinite(value) and value >= 0:
                usage[name] = round(value)
                if isinstance(value, float):
                    self._note("usage_odd", name[:64])
            else:
                self._note("usage_odd", name[:64])
        return usage

    def _joined(self, place: tuple[Any, ...], text: str, over: bool) -> str:
        """Return ``text`` after the half of a character that was held of this place.

        A half at its own end is held in turn, unless the text is ``over``.
        """
        if place in self._held:
            text = self._held.pop(place) + text
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
            self._note("surrogate_pair_joined")
        if not over and text and _HIGH[0] <= text[-1] <= _HIGH[1]:
            self._held[place] = text[-1]
            text = text[:-1]
        return text

    def _without_surrogates(self, value: Any) -> Any:
        """Return ``value`` with U+FFFD for each half of a character in its texts.

        Halves in the arguments of calls stay: they can only be joined per call.
        """
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                self._note("surrogate_replaced")
                return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            return value
        if isinstance(value, dict):
            return {
                self._without_surrogates(name): one
                if name == "arguments" and isinstance(one, str)
                else self._without_surrogates(one)
                for name, one in value.items()
            }
        if isinstance(value, list):
            return [self._without_surrogates(one) for one in value]
        return value

    def _note(self, name: str, detail: str = "") -> None:
        self._notes[Note(name, detail)] = None


def _entry(given: Any) -> Any:
    if given is None:
        return {"logprob": math.nan}
    if not isinstance(given, dict):
        return given
    entry = {**given, "logprob": as_logprob(given.get("logprob"))}
    if isinstance(entry.get("top_logprobs"), list):
        entry["top_logprobs"] = [
            {**top, "logprob": _shown(top.get("logprob"))}
            for top in entry["top_logprobs"]
            if isinstance(top, dict)
        ]
    return entry


def _top(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return None
    return {name: _shown(value) for name, value in given.items()}


def as_logprob(value: Any) -> float:
    """Return a logprob as a number, NaN for a missing one."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _shown(value: Any) -> float:
    """Return a logprob that is only shown to the client, always a finite number."""
    number = as_logprob(value)
    return number if math.isfinite(number) else MISSING_LOGPROB


def _as_index(value: Any) -> Any:
    if isinstance(value, str) and value.isdecimal():
        return int(value[:9])
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)[:256]


def _dumped(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):  # halves of characters, or integers beyond 64 bits
        return json.dumps(value, ensure_ascii=False)
