"""A stand-in for the interface of vLLM's reasoning parsers."""

from collections.abc import Callable
from typing import Any


class ReasoningParser:
    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.vocab = tokenizer


class ReasoningParserManager:
    registered: dict[str, type[ReasoningParser]] = {}  # noqa: RUF012

    @classmethod
    def register_module(cls, name: str) -> Callable[[type[ReasoningParser]], type[ReasoningParser]]:
        def register(parser: type[ReasoningParser]) -> type[ReasoningParser]:
            cls.registered[name] = parser
            return parser

        return register
