"""Errors of engines and chat templates."""

from __future__ import annotations

from typing import Any

from bridle.errors import BridleError


class TemplateError(BridleError, ValueError):
    """The model's chat template is missing, or refused these messages."""


class RequestRefused(BridleError):
    """The engine refuses this request.

    The client gets ``status`` and :meth:`body`, in vLLM's wording and shape.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
        value: object = None,
    ) -> None:
        # vLLM appends the offending parameter and value to the message itself.
        named = [f"parameter={param}"] if param is not None else []
        named += [f"value={value}"] if value is not None else []
        self.message = f"{message} ({', '.join(named)})" if named else message
        super().__init__(self.message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }


def context_overflow(prompt_tokens: int, max_model_len: int) -> RequestRefused:
    """Return the refusal of a prompt that alone is longer than the model's context."""
    return RequestRefused(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
        f"contains {prompt_tokens} input tokens, which exceeds this limit even without any "
        "output tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
        value=prompt_tokens,
    )


def unknown_model(name: str, served: str) -> RequestRefused:
    return RequestRefused(
        f"The model `{name}` does not exist. Valid aliases: {served}.",
        status=404,
        kind="NotFoundError",
        param="model",
    )


class ConnectionCut(BridleError):
    """A fault injection: the client's connection is dropped here, without another byte."""

    retryable = True
