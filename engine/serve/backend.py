"""The interface of a backend, which turns prompts into steps of sampled tokens.

``engine/serve/server.py`` turns a :class:`Backend` into the contract's routes. The embedded engine
and the scripted engine are its two implementations; vLLM brings a server of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.contract import ModelCard, PauseMode
from bridle.engine.contract.tokenizer import Tokenizer

EngineFinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one sequence. Defaults are vLLM's."""

    max_tokens: int
    """Maximum number of sampled tokens: at least 1, and never more than is left of the context."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """The seed, with which the same request gives the same tokens whatever else is running."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end a reply, besides the model's own end-of-turn ids."""
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    """The number ``k``, for logprobs of the prompt's ids and of the ``k`` likeliest; ``None`` for
    none."""

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def truncates(self) -> bool:
        """Return whether top-k, top-p or min-p leaves tokens out."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a reply."""

    token_ids: Sequence[int]
    """Ids of everything that a model conditions on."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The chat messages from which it was rendered; for backends that answer by script."""
    tools: Sequence[Mapping[str, Any]] = ()
    response_format: Mapping[str, Any] | None = None


class SampledToken(NamedTuple):
    """One sampled token and its logprob in the distribution that it was drawn from."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest ids and their logprobs, best first, if requested."""
    kept: tuple[int, ...] = ()
    """The ids that it was drawn from, if top-k, top-p or min-p left some out; all ids if empty."""


class PromptLogprob(NamedTuple):
    """Logprob of a prompt id given its predecessors."""

    id: int
    logprob: float
    rank: int
    """1 for the likeliest id."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Step:
    """The output of one sequence since the last step that its reader took."""

    tokens: list[SampledToken] = field(default_factory=list)
    finish: EngineFinishReason | None = None
    stop_token: int | None = None
    """The id of ``SamplingParams.stop_token_ids`` that ended the reply; ``None`` for the model's
    own."""
    cached_tokens: int = 0
    """Prompt tokens that needed no computing; set in the first step."""
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """One entry per prompt id, the first of which is ``None``; set in the first step, if
    requested."""
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    """The experts of the positions computed since the last step, ``[positions, layers, top_k]``
    each; empty if the model has none. The last sampled token is not computed."""


class Backend(Protocol):
    """A policy that can be sampled from, paused, and given new weights."""

    tokenizer: Tokenizer
    card: ModelCard
    vocab_size: int
    """The bound that all prompt ids are below."""
    samples: bool
    """True if it computes a policy and draws from it; false for a script that writes replies."""

    @property
    def policy_version(self) -> int:
        """A number that grows with every accepted weight reload."""
        ...

    @property
    def weights_fingerprint(self) -> str:
        """A text that identifies the served weights, the same in every process that serves them."""
        ...

    @property
    def healthy(self) -> bool: ...

    async def generate(self, prompt: Prompt, sampling: SamplingParams) -> AsyncGenerator[Step]:
        """Admit a request and return its steps; the last one has ``finish``.

        Closing the generator frees everything that the request holds. Raise
        :class:`bridle.engine.contract.errors.RequestRefused`, before anything is sampled, if the
        request is refused.
        """
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stop sampling, and let new requests queue until :meth:`resume`.

        Freeze running replies (``keep``), let them end (``wait``), or end them with finish reason
        ``abort``.
        """
        ...

    async def resume(self) -> None: ...

    @property
    def paused(self) -> bool: ...

    async def reload_weights(self, directory: str) -> None:
        """Serve the weights in ``directory``.

        Raise ``RequestRefused`` if they do not fit; the old ones are then still served, untouched.
        """
        ...

    async def reset_prefix_cache(self) -> None: ...
