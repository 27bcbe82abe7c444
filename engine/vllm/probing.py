"""Small requests to a running engine, and their replies in one form, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from bridle.engine.contract import contract
from bridle.engine.contract.client import connection
from bridle.errors import BridleError

QUESTION = [{"role": "user", "content": "Say hello."}]


class ProbeFailed(BridleError):
    """The engine did not answer a probe in the contract's way."""


@dataclass(slots=True)
class ProbeReply:
    prompt_ids: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    """Logprobs of the likeliest ids at each position, if requested."""
    tool_names: list[str] = field(default_factory=list)
    content: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int | None:
        """The number of prompt tokens taken from the prefix cache.

        It is ``None`` if the engine does not report them.
        """
        details = self.usage.get("prompt_tokens_details")
        return details.get("cached_tokens") if isinstance(details, dict) else None


class LaunchProbe:
    """A connection to the engine at ``base_url``; a context manager."""

    def __init__(self, base_url: str, *, timeout: float, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = connection(self.base_url, timeout=timeout, api_key=api_key)
        self.model = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> httpx.Response:
        """Return the reply to ``GET``, whatever its status.

        Raise :class:`ProbeFailed` if there is none.
        """
        return self._request("GET", path)

    def get_json(self, path: str) -> dict[str, Any]:
        return _json(self._request("GET", path))

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self._request("POST", path, json=body)

    def chat(self, *, stream: bool = False, **fields: Any) -> ProbeReply:
        """Request a chat completion with ids and logprobs.

        It has 8 greedy tokens, unless ``fields`` change that.
        """
        body = {
            "model": self.model,
            "messages": QUESTION,
            "max_tokens": 8,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            **fields,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return _fold(self._events(contract.CHAT_COMPLETIONS, body))
        return _fold([_json(self._request("POST", contract.CHAT_COMPLETIONS, json=body))])

    def complete(self, prompt: Sequence[int], **fields: Any) -> ProbeReply:
        """Request a text completion of token ids: 8 tokens, unless ``fields`` change that."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": 8,
            "logprobs": 0,
            "return_token_ids": True,
            **fields,
        }
        return _fold([_json(self._request("POST", contract.COMPLETIONS, json=body))])

    def tokenize(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(_json(self._request("POST", contract.TOKENIZE, json=body))["tokens"])

    def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise ProbeFailed(f"{method} {path}: {type(error).__name__} {error}") from error

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                    _json(response)
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise ProbeFailed(f"POST {path}: {type(error).__name__} {error}") from error


def refusal(response: httpx.Response) -> str:
    """Return the reason for a refusal, in the engine's own words."""
    try:
        body = response.json()
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else response.text)[:200]


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.is_error:
        raise ProbeFailed(
            f"{response.request.url.path} answered {response.status_code}: {refusal(response)}"
        )
    if not isinstance(body, dict):
        raise ProbeFailed(f"{response.request.url.path} did not answer a JSON object")
    return body


def _fold(parts: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> ProbeReply:
    """Return the chunks of a stream, or the body of a whole reply, as one :class:`ProbeReply`."""
    reply = ProbeReply()
    for part in parts:
        reply.usage = part.get("usage") or reply.usage
        if part.get("prompt_token_ids") is not None:
            reply.prompt_ids = part["prompt_token_ids"]
        for choice in part.get("choices", []):
            if choice.get("prompt_token_ids") is not None:
                reply.prompt_ids = choice["prompt_token_ids"]
            reply.token_ids += choice.get("token_ids") or []
            message = choice.get("message") or choice.get("delta") or {}
            reply.content += message.get("content") or choice.get("text") or ""
            for call in message.get("tool_calls") or []:
                name = (call.get("function") or {}).get("name")
                reply.tool_names += [name] if name else []
            _add_logprobs(reply, choice.get("logprobs") or {})
    return reply


def _add_logprobs(reply: ProbeReply, logprobs: Mapping[str, Any]) -> None:
    for entry in logprobs.get("content") or []:
        reply.logprobs.append(entry["logprob"])
        reply.top_logprobs.append([top["logprob"] for top in entry.get("top_logprobs") or []])
    reply.logprobs += logprobs.get("token_logprobs") or []
