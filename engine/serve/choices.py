"""One choice of a reply: sampled tokens in, text and deltas out, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.detokenizer import Detokenizer
from bridle.engine.serve.backend import SampledToken, Step
from bridle.engine.serve.deltas import Content, Delta
from bridle.engine.serve.markup import MarkupReader, ThinkingParser
from bridle.engine.serve.stopping import StopScanner


@dataclass(slots=True)
class Piece:
    """The output of one step of a choice: sent as one chunk, or folded into the whole reply."""

    index: int
    tokens: Sequence[SampledToken] = ()
    deltas: list[Delta] = field(default_factory=list)
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``. A chat reply has ``tool_calls`` instead of ``stop`` after
    calls."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the reply."""
    routed_experts: NDArray[np.int16] | None = None
    """The experts of prompt and reply without its last token, ``[positions, layers, top_k]``; with
    the last piece of a model that has experts."""


class ChoiceReader:
    """A reader of the steps of one sequence.

    Text goes through the detokeniser, the stop scanner, and the parsers. Each of them may hold text
    back, while its tokens are always in the piece of the step that sampled them.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop: StopScanner,
    ) -> None:
        self.index = index
        self.sampled = 0
        """Number of tokens read so far."""
        self.finished = False
        self._experts: list[NDArray[np.int16]] = []
        self._detokenizer = detokenizer
        self._stop = stop
        self.thinking: ThinkingParser | None = None
        """The parser of reasoning; set before the first step if the reply may begin with
        reasoning."""
        self.tools: MarkupReader | None = None
        """The reader of tool calls; set before the first step if the reply may call tools."""

    def read(self, step: Step) -> Piece:
        piece = Piece(self.index)
        taken = 0
        for token in step.tokens:
            taken += 1
            piece.deltas += self._parse(self._stop.push(self._detokenizer.push(token.id)))
            if self._stop.matched is not None:
                break
        piece.tokens = step.tokens[:taken]
        self.sampled += taken
        self._experts += step.experts
        if self._stop.matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._stop.matched
        elif step.finish is not None:
            rest = self._stop.push(self._detokenizer.flush())
            piece.deltas += self._parse(rest + self._stop.flush())
            piece.finish_reason, piece.stop_reason = step.finish, step.stop_token
        if piece.finish_reason is not None:
            self.finished = True
            if self._experts:
                experts = np.concatenate(self._experts)
                piece.routed_experts = experts[: len(experts) - (len(step.tokens) - taken)]
            piece.deltas += self._flush()
        return piece

    def _parse(self, text: str) -> Iterator[Delta]:
        if not text:
            return
        if self.thinking is None:
            yield from self._parse_content(text)
            return
        for delta in self.thinking.push(text):
            yield from self._after_thinking(delta)

    def _flush(self) -> Iterator[Delta]:
        for delta in self.thinking.flush() if self.thinking else ():
            yield from self._after_thinking(delta)
        if self.tools is not None:
            yield from self.tools.flush()

    def _after_thinking(self, delta: Delta) -> Iterator[Delta]:
        if isinstance(delta, Content):
            yield from self._parse_content(delta.text)
        else:
            yield delta

    def _parse_content(self, text: str) -> Iterator[Delta]:
        if self.tools is None:
            yield Content(text)
        else:
            yield from self.tools.push(text)
