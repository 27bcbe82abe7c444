"""A stand-in for vLLM's streamed message."""

from dataclasses import dataclass


@dataclass
class DeltaMessage:
    reasoning: str | None = None
    content: str | None = None
