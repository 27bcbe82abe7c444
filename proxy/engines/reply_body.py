"""The JSON of an upstream's reply, a chunk or a whole body, as data.

The usual shape (vLLM's, ``engine/contract/contract.py``) is decoded strictly and fast. A payload
that is refused there goes through :class:`bridle.proxy.engines.odd_reply.OddReply`, which knows the
other shapes that upstreams use, and then through the same strict types.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from bridle.proxy.wire.canonical import ApiError

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


class Choice(msgspec.Struct, Generic[Entry], gc=False):
    index: Index = 0
    delta: Text | None = None
    message: Text | None = None
    text: str | None = None
    logprobs: Logprobs[Entry] | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | str | None = None
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

    @property
    def is_bare(self) -> bool:
        """Whether it has no content."""
        return not self.choices and self.usage is None and self.prompt_token_ids is None


LeanBody = Body[LogprobEntry]
DetailedBody = Body[dict[str, Any]]
"""A body whose logprob entries stay as the upstream wrote them, for clients that want to see
them."""


def malformed(detail: str) -> ApiError:
    return ApiError("upstream_error", f"the engine sent a malformed reply: {detail}", status=502)
