"""Failures in each provider's shape and words, raised by the official clients as their own."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import orjson
import pytest
from google import genai
from google.genai import errors as google_errors
from google.genai import types

from bridle.proxy.dialects import overflow
from bridle.proxy.dialects.registry import GOOGLE, MESSAGES, RESPONSES
from bridle.proxy.wire.canonical import ApiError, Overflow

ENGINE_SAYS = (
    "This model's maximum context length is 4096 tokens. However, your request has 9000 input "
    "tokens. Please reduce the length of the input messages."
)
WITH_OUTPUT = (
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
    "(1000 in the messages, 4000 in the completion). Please reduce the length."
)
KINDS = [
    ("invalid_request", 400),
    ("authentication", 401),
    ("permission", 403),
    ("not_found", 404),
    ("too_large", 413),
    ("context_overflow", 400),
    ("rate_limit", 429),
    ("budget", 429),
    ("overloaded", 503),
    ("upstream_unreachable", 502),
    ("upstream_timeout", 504),
    ("upstream_error", 502),
    ("store_unavailable", 503),
    ("internal", 500),
]


def failing(kind: str, status: int, message: str = "no", **more: Any) -> ApiError:
    return ApiError(kind, message, status=status, **more)


@pytest.mark.parametrize(("kind", "status"), KINDS)
def test_openais_client_raises_its_own_error(server: Any, kind: str, status: int) -> None:
    told = RESPONSES.error(failing(kind, status, param="model"))
    server.answer(told.body, status=told.status, headers=told.headers)
    client = openai.OpenAI(api_key="k", base_url=f"{server.url}/v1", max_retries=0)

    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model="m", input="hi")

    assert caught.value.status_code == status
    assert caught.value.param == "model"
    assert caught.value.type is not None
    assert caught.value.code is not None or kind == "invalid_request"


@pytest.mark.parametrize(("kind", "status"), KINDS)
def test_anthropics_client_raises_its_own_error(server: Any, kind: str, status: int) -> None:
    told = MESSAGES.error(failing(kind, status))
    server.answer(told.body, status=told.status, headers=told.headers)
    client = anthropic.Anthropic(api_key="k", base_url=server.url, max_retries=0)

    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(
            model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}]
        )

    body: Any = caught.value.body
    assert caught.value.status_code == status
    assert body["type"] == "error"
    assert body["error"]["type"].endswith(("_error", "_too_large"))


@pytest.mark.parametrize(("kind", "status"), KINDS)
def test_googles_client_raises_its_own_error(server: Any, kind: str, status: int) -> None:
    told = GOOGLE.error(failing(kind, status))
    server.answer(told.body, status=told.status, headers=told.headers)
    retries = types.HttpRetryOptions(attempts=1)
    options = types.HttpOptions(base_url=server.url, retry_options=retries)
    client = genai.Client(api_key="k", http_options=options)

    with pytest.raises(google_errors.APIError) as caught:
        client.models.generate_content(model="m", contents="hi")

    assert caught.value.code == status
    assert caught.value.status is not None
    assert caught.value.status.isupper()


@pytest.mark.parametrize(
    ("kind", "status", "openai_code", "anthropic_type", "google_status"),
    [
        ("authentication", 401, "invalid_api_key", "authentication_error", "UNAUTHENTICATED"),
        ("permission", 403, "permission_denied", "permission_error", "PERMISSION_DENIED"),
        ("rate_limit", 429, "rate_limit_exceeded", "rate_limit_error", "RESOURCE_EXHAUSTED"),
        ("budget", 429, "insufficient_quota", "rate_limit_error", "RESOURCE_EXHAUSTED"),
        ("overloaded", 503, "server_is_overloaded", "overloaded_error", "UNAVAILABLE"),
        ("upstream_timeout", 504, "upstream_timeout", "timeout_error", "DEADLINE_EXCEEDED"),
        ("internal", 500, "server_error", "api_error", "INTERNAL"),
    ],
)
def test_each_kind_has_the_providers_word(
    kind: str, status: int, openai_code: str, anthropic_type: str, google_status: str
) -> None:
    error = failing(kind, status)

    def shown(dialect: Any) -> Any:
        return orjson.loads(dialect.error(error).body)["error"]

    assert shown(RESPONSES)["code"] == openai_code
    assert shown(MESSAGES)["type"] == anthropic_type
    assert shown(GOOGLE)["status"] == google_status


@pytest.mark.parametrize(
    ("param", "code"),
    [("model", "model_not_found"), ("previous_response_id", "previous_response_not_found")],
)
def test_what_was_not_found_is_called_so(param: str, code: str) -> None:
    error = failing("not_found", 404, param=param)

    assert orjson.loads(RESPONSES.error(error).body)["error"]["code"] == code


@pytest.mark.parametrize(
    ("engines", "clients"),
    [("max_tokens", "max_output_tokens"), ("messages", "input"), ("temperature", "temperature")],
)
def test_a_parameter_that_the_engine_refuses_has_the_name_that_the_client_gave_it(
    engines: str, clients: str
) -> None:
    names = RESPONSES.parse(b'{"model":"m","input":"hi"}', {}, {}).names
    error = failing("invalid_request", 400, param=engines).renamed(names)

    assert orjson.loads(RESPONSES.error(error).body)["error"]["param"] == clients


@pytest.mark.parametrize(
    ("message", "openai_words", "anthropic_words", "google_words"),
    [
        (
            ENGINE_SAYS,
            "This model's maximum context length is 4096 tokens. However, your messages resulted "
            "in 9000 tokens. Please reduce the length of the messages.",
            "prompt is too long: 9000 tokens > 4096 maximum",
            "The input token count (9000) exceeds the maximum number of tokens allowed (4096).",
        ),
        (
            WITH_OUTPUT,
            "This model's maximum context length is 4096 tokens. However, you requested 5000 "
            "tokens (1000 in the messages, 4000 in the completion). Please reduce the length of "
            "the messages or completion.",
            "input length and `max_tokens` exceed context limit: 1000 + 4000 > 4096, decrease "
            "input length or `max_tokens` and try again",
            "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
        ),
        (
            "too much",
            "Your input exceeds the context window of this model. too much",
            "prompt is too long: too much",
            "The input token count exceeds the maximum number of tokens allowed. too much",
        ),
    ],
)
def test_context_overflow_is_told_in_the_words_that_harnesses_match(
    message: str, openai_words: str, anthropic_words: str, google_words: str
) -> None:
    error = failing("context_overflow", 400, message)

    def shown(dialect: Any) -> Any:
        return orjson.loads(dialect.error(error).body)["error"]

    assert shown(RESPONSES)["message"] == openai_words
    assert shown(RESPONSES)["code"] == "context_length_exceeded"
    assert shown(MESSAGES)["message"] == anthropic_words
    assert shown(MESSAGES)["type"] == "invalid_request_error"
    assert shown(GOOGLE)["message"] == google_words
    assert shown(GOOGLE)["status"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (ENGINE_SAYS, (9000, None, 4096)),
        (WITH_OUTPUT, (1000, 4000, 4096)),
        (
            "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
            (5000, None, 4096),
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum "
            "context length is 4096 tokens and your request has 100 input tokens "
            "(5000 > 4096 - 100).",
            (100, 5000, 4096),
        ),
        (
            "Input length (5000) exceeds model's maximum context length (4096).",
            (5000, None, 4096),
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains "
            "90000 characters (more than 81920 characters, which is the upper bound for 4096 "
            "input tokens). Please reduce the length of the input prompt.",
            (None, None, 4096),
        ),
        ("prompt is too long: 7 tokens > 5 maximum", (7, None, 5)),
        (
            "This model's maximum context length is 4096 tokens. However, your messages resulted "
            "in 5000 tokens. Please reduce the length of the messages.",
            (5000, None, 4096),
        ),
        (
            "This endpoint's maximum context length is 4096 tokens. However, you requested about "
            "5000 tokens (4000 of text input, 1000 in the output).",
            (4000, 1000, 4096),
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 100 output "
            "tokens and your prompt contains at least 4000 input tokens, for a total of at least",
            (4000, 100, 4096),
        ),
        (
            "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
            (5000, None, 4096),
        ),
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
            "requested a total of 5000 tokens: 4000 tokens from the input messages and 1000 tokens "
            "for the completion.",
            (4000, 1000, 4096),
        ),
        (
            "request (124071 tokens) exceeds the available context size (123904 tokens), try "
            "increasing it",
            (124071, None, 123904),
        ),
        (
            "the request exceeds the available context size. try increasing the context size or "
            "enable context shift",
            (None, None, None),
        ),
        ("Context size has been exceeded.", (None, None, None)),
        (
            "The input token count (1048577) exceeds the maximum number of tokens allowed "
            "(1048576).",
            (1048577, None, 1048576),
        ),
        (
            "The input token count exceeds the maximum number of tokens allowed (1048576).",
            (None, None, 1048576),
        ),
        (
            "Unable to submit request because the input token count is 1148577 but model only "
            "supports up to 1048576. Reduce the input token count and try again.",
            (1148577, None, 1048576),
        ),
        (
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: "
            "4000 `inputs` tokens and 200 `max_new_tokens`",
            (4000, 200, 4096),
        ),
        (
            "Input validation error: `inputs` must have less than 1024 tokens. Given: 5000",
            (5000, None, 1024),
        ),
        (
            "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease "
            "input length or `max_tokens` and try again",
            (190000, 20000, 200000),
        ),
        (
            "The prompt is too long: 140000, model maximum context length: 131071",
            (140000, None, 131071),
        ),
        (
            "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 "
            "maximum context length",
            (40000, None, 32768),
        ),
        (
            "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
            (140000, None, 131072),
        ),
        (
            "Invalid request: Your request exceeded model token limit: 131072 (requested: 140000)",
            (140000, None, 131072),
        ),
        ("prompt token count of 70000 exceeds the limit of 64000", (70000, None, 64000)),
        (
            "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received "
            "5000.",
            (5000, None, 4081),
        ),
        (
            "Please reduce the length of the messages or completion. Current length is 9000 while "
            "limit is 8192",
            (9000, None, 8192),
        ),
        ("Range of input length should be [1, 30720]", (None, None, 30720)),
        ("Input is too long for requested model.", (None, None, None)),
        ("invalid params, context window exceeds limit (2013)", (None, None, None)),
        ("Prompt exceeds max length", (None, None, None)),
        ("the input length exceeds the context length", (None, None, None)),
        (
            "Trying to keep the first 9000 tokens when context the overflows. However, the number "
            "of tokens to keep is greater than the context length",
            (None, None, None),
        ),
        ("Reached context length of 4096 tokens with this model", (None, None, 4096)),
    ],
)
def test_an_upstreams_sentence_for_an_overflow_is_known_and_its_numbers_are_read(
    message: str, expected: tuple[int | None, ...]
) -> None:
    assert overflow.is_overflow(message)
    assert overflow.read(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        "no numbers",
        "max_tokens must be at least 1, got 0",
        "Rate limit reached for tokens per min: limit 30000, requested 40000",
        "temperature must be at most 2",
    ],
)
def test_other_sentences_are_no_overflow(message: str) -> None:
    assert not overflow.is_overflow(message)
    assert overflow.read(message) == (None, None, None)


_READ_BY_PROGRAMS: Any = {
    "retry_after": 2.0,
    "details": {"error_code": "thread_not_found"},
    "overflow": Overflow(limit=8, prompt=9),
}


def test_another_wording_keeps_what_programs_read() -> None:
    error = ApiError(
        "invalid_request",
        "top_k is bad",
        status=400,
        param="top_k",
        **_READ_BY_PROGRAMS,
    )
    about_messages = ApiError("invalid_request", "no", status=400, **_READ_BY_PROGRAMS)
    for worded in (error.renamed({"top_k": "topK"}), about_messages.hinted("Send fewer.")):
        assert worded.details == error.details
        assert (worded.retry_after, worded.overflow) == (2.0, error.overflow)
    assert error.renamed({"top_k": "topK"}).param == "topK"


def test_numbers_beside_the_message_come_first() -> None:
    error = ApiError("context_overflow", "too much", status=400, overflow=Overflow(7, None, 5))
    words = orjson.loads(MESSAGES.error(error).body)["error"]["message"]
    assert words == "prompt is too long: 7 tokens > 5 maximum"


@pytest.mark.parametrize("dialect", [RESPONSES, MESSAGES, GOOGLE])
def test_waiting_and_giving_up_are_told_in_headers(dialect: Any) -> None:
    busy = dict(dialect.error(failing("rate_limit", 429, retry_after=1.2)).headers)
    spent = dict(dialect.error(failing("budget", 429)).headers)

    assert busy["retry-after"] == "2"
    assert "x-should-retry" not in busy
    assert spent["x-should-retry"] == "false"


def test_googles_details_tell_a_spent_quota_from_a_short_wait() -> None:
    busy = orjson.loads(GOOGLE.error(failing("rate_limit", 429, retry_after=1.5)).body)
    spent = orjson.loads(GOOGLE.error(failing("budget", 429)).body)

    assert busy["error"]["details"][0]["retryDelay"] == "1.5s"
    assert "PerDay" in spent["error"]["details"][0]["violations"][0]["quotaId"]


@pytest.mark.parametrize("client_retries", [2])
def test_a_spent_budget_is_asked_for_once(server: Any, client_retries: int) -> None:
    body = MESSAGES.error(failing("budget", 429))
    server.answer(body.body, status=429, headers=body.headers)
    client = anthropic.Anthropic(api_key="k", base_url=server.url, max_retries=client_retries)

    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(
            model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}]
        )
    assert len(server.received) == 1
