"""Request bodies, parsed and checked. Errors are refused with vLLM's messages.

Fields that are not listed here are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from bridle.engine.contract.errors import RequestRefused, context_overflow
from bridle.engine.serve.backend import SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16384

Body = TypeVar("Body", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and text completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class KvTransferParams(msgspec.Struct, frozen=True):
    prompt_token_ids: list[int] | None = None


class ChatBody(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    kv_transfer_params: KvTransferParams | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def parses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def named_tool(self) -> bool:
        return isinstance(self.tool_choice, dict)


class CompletionBody(SamplingFields, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    add_special_tokens: bool = True
    """True if special tokens that the tokenizer puts around a text, such as BOS, are added to a
    text prompt."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """True if special tokens are added, as in a completion. By default they are added to a prompt,
    but not to messages, whose template writes them."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class RpcBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /collective_rpc``."""

    method: str
    kwargs: dict[str, Any] = {}


def read_body(kind: type[Body], body: bytes) -> Body:
    """Parse ``body``; numbers may be spelled as strings, as in vLLM's validation.

    Raise :class:`RequestRefused` if it is not valid.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`").partition("[")[0] or _missing_field(problem)
        raise RequestRefused(
            f"1 validation error: {problem}", kind="Bad Request", param=field
        ) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestRefused(f"The body is not JSON: {error}", kind="Bad Request") from error


def check_chat(body: ChatBody) -> None:
    """Check everything about a chat request that can be refused without the prompt."""
    if not body.messages:
        raise RequestRefused("`messages` must not be an empty array.", param="messages")
    for index, message in enumerate(body.messages):
        if not isinstance(message.get("role"), str):
            raise RequestRefused("Each message needs a `role`.", param=f"messages.{index}.role")
    _check_tools(body.tools, body.tool_choice)
    top = body.top_logprobs or 0
    if top < 0:
        raise RequestRefused(
            "`top_logprobs` must be a positive value or -1.", param="top_logprobs", value=top
        )
    if top and not body.logprobs:
        raise RequestRefused(
            "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
        )
    _check_logprob_count(top)
    _check_common(body)


def check_completion(body: CompletionBody) -> list[str | list[int]]:
    """Check a text completion. Return its prompts, each text or token ids."""
    if body.echo:
        raise RequestRefused("`echo` is not supported by this engine.", param="echo")
    if body.logprobs is not None and body.logprobs < 0:
        raise RequestRefused(
            f"logprobs must be non-negative or -1, got {body.logprobs}.",
            param="logprobs",
            value=body.logprobs,
        )
    _check_logprob_count(body.logprobs or 0)
    _check_common(body)
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(_is_id(item) for item in prompt):
        return [prompt]
    if prompt and all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if prompt and all(
        isinstance(item, list) and item and all(_is_id(token_id) for token_id in item)
        for item in prompt
    ):
        return list(prompt)
    raise RequestRefused(
        "`prompt` must be a text, a list of token ids, or a non-empty list of either.",
        param="prompt",
    )


def sampling_of(
    body: SamplingFields,
    *,
    prompt_tokens: int,
    max_model_len: int,
    limit: int | None,
    limit_name: str,
    top_logprobs: int,
    choice: int,
) -> SamplingParams:
    """Return the sampling of the request's ``choice``-th sequence.

    Raise :class:`RequestRefused` if it overflows the context.
    """
    if prompt_tokens > max_model_len:
        raise context_overflow(prompt_tokens, max_model_len)
    if limit is not None and limit > max_model_len:
        raise RequestRefused(
            f"{limit_name}={limit} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            param=limit_name,
            value=limit,
        )
    left = max_model_len - prompt_tokens
    max_tokens = left if limit is None else min(limit, left)
    if max_tokens < 1:
        raise RequestRefused(
            f"max_tokens must be at least 1, got {max_tokens}.",
            param="max_tokens",
            value=max_tokens,
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=None if body.seed is None else body.seed + choice,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        top_logprobs=top_logprobs,
        prompt_logprobs=body.prompt_logprobs if choice == 0 else None,
    )


def _check_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
    if tools == []:
        raise RequestRefused(
            "`tools` must not be an empty array. "
            "Either provide at least one tool or omit the field entirely.",
            param="tools",
        )
    names = set()
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestRefused("Each tool needs a function name.", param=f"tools.{index}")
        names.add(function["name"])
    if choice is None or choice == "none":
        return
    if tools is None:
        raise RequestRefused("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or function.get("name") not in names:
            raise RequestRefused(
                "The tool specified in `tool_choice` does not match any of the specified `tools`",
                param="tool_choice.function.name",
            )
    elif choice not in ("auto", "required"):
        raise RequestRefused(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or '
            '"required" are supported.',
            param="tool_choice",
        )


def _check_common(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestRefused(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    _check_range("temperature", body.temperature, 0.0, 2.0)
    _check_range("min_p", body.min_p, 0.0, 1.0)
    _check_range("presence_penalty", body.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", body.frequency_penalty, -2.0, 2.0)
    if body.repetition_penalty is not None and not 0.0 < body.repetition_penalty < math.inf:
        raise RequestRefused(
            f"repetition_penalty must be greater than zero, got {body.repetition_penalty}."
        )
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise RequestRefused(
            f"top_p must be in (0, 1], got {body.top_p}.", param="top_p", value=body.top_p
        )
    if body.top_k is not None and body.top_k < -1:
        raise RequestRefused(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
    if any(not stop for stop in body.stops):
        raise RequestRefused("stop cannot contain an empty string.")
    if not 1 <= body.choices <= MAX_CHOICES:
        raise RequestRefused(f"n must be at least 1, got {body.choices}.")
    if body.choices > 1 and body.temperature is not None and body.temperature < 1e-5:
        raise RequestRefused(f"n must be 1 when using greedy sampling, got {body.choices}.")
    if body.prompt_logprobs is not None:
        _check_prompt_logprobs(body.prompt_logprobs, streamed=bool(body.stream))


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise RequestRefused(
            f"{name} must be in [{low:g}, {high:g}], got {value}.", param=name, value=value
        )


def _check_prompt_logprobs(count: int, *, streamed: bool) -> None:
    if count < 0:
        raise RequestRefused(
            "`prompt_logprobs` must be a positive value or -1.",
            param="prompt_logprobs",
            value=count,
        )
    if streamed and count > 0:
        raise RequestRefused(
            "`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs"
        )
    _check_logprob_count(count)


def _check_logprob_count(count: int) -> None:
    if count > MAX_TOP_LOGPROBS:
        raise RequestRefused(
            f"Requested sample logprobs of {count}, which is greater than max allowed: "
            f"{MAX_TOP_LOGPROBS}",
            param="logprobs",
            value=count,
        )


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _missing_field(problem: str) -> str | None:
    """Return the field that msgspec reports as missing: ``Object missing required field `x```."""
    before, _, rest = problem.partition("required field `")
    return rest.rstrip("`") or None if before != problem else None
