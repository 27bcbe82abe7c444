"""Continuous batching: the choice of the tokens that the next forward pass computes.

A sequence consists of its tokens and the number of them that are computed. A sequence with one
token left to compute decodes: every step computes that token. The rest of a step's token budget is
shared among the sequences with more tokens left, whose prompts are being computed. A sequence whose
last token was computed samples its next one. Sequences join and leave between steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray

from bridle.engine.embedded.attention import Chunk
from bridle.engine.embedded.kv import PrefixCache, SequenceKV, shared_prefix
from bridle.engine.embedded.model import PackedModel
from bridle.engine.embedded.sampling import SamplingRow, sample
from bridle.engine.serve.backend import (
    EngineFinishReason,
    Prompt,
    PromptLogprob,
    SampledToken,
    SamplingParams,
)

_WORTH_WAITING = 64
"""Number of tokens. A prompt waits for one that is being computed if it shares so many more with
it."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on a step and on memory."""

    max_running: Annotated[int, Meta(ge=1)] = 64
    """Maximum number of sequences that compute at the same time; more wait."""
    step_tokens: Annotated[int, Meta(ge=1)] = 512
    """Maximum tokens of one forward pass, decoding ones included, so that none waits long for a
    prompt."""
    kv_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Maximum bytes of keys and values. Beyond it, those of finished sequences are dropped; new
    sequences wait if the running ones alone reach it."""


@dataclass(eq=False, slots=True)
class Generation:
    """One token sequence from its request to its end."""

    prompt: Prompt
    sampling: SamplingParams
    tokens: list[int] = field(init=False)
    """Prompt tokens, then sampled tokens."""
    prompt_array: NDArray[np.int64] = field(init=False)
    kv: SequenceKV | None = None
    """The computed keys and values; set while it runs."""
    cached_tokens: int = 0
    scores: list[PromptLogprob | None] | None = field(init=False)
    generator: random.Random = field(init=False)
    experts_from: int = 0
    """The first position whose experts were not returned yet."""
    waits_for: Generation | None = None
    """A running sequence that is computing a prefix that this one shares."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt.token_ids)
        self.prompt_array = np.asarray(self.tokens, np.int64)
        self.scores = None if self.sampling.prompt_logprobs is None else [None]
        self.generator = random.Random(self.sampling.seed)

    @property
    def pending(self) -> int:
        """Number of tokens that are not computed yet."""
        return len(self.tokens) - (self.kv.length if self.kv else 0)

    @property
    def sampled(self) -> int:
        return len(self.tokens) - len(self.prompt_array)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step for one sequence."""

    sequence: Generation
    token: SampledToken | None
    finish: EngineFinishReason | None
    stop_token: int | None = None
    experts: NDArray[np.int16] | None = None
    """The experts of the positions computed since the last outcome, ``[positions, layers, top_k]``;
    ``None`` if the model has none."""


class Scheduler:
    """Runs sequences on a model, one :meth:`step` at a time. Not thread-safe."""

    def __init__(
        self, model: PackedModel, eos_token_ids: frozenset[int], limits: SchedulerLimits
    ) -> None:
        self.model = model
        self.limits = limits
        self.version = 0
        """The policy version. Code that replaces the model's weights raises it with
        :meth:`new_version`."""
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.cache = PrefixCache(limits.kv_bytes)
        self.steps = 0
        self.computed_tokens = 0
        """Number of tokens that went through the model, prompts and sampled ones."""
        self._eos = eos_token_ids

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Generation) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Generation) -> None:
        """Forget a sequence whose reader has gone; what was computed stays in the cache."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._retire(sequence)

    def abort_all(self) -> list[StepOutcome]:
        outcomes = [StepOutcome(each, None, "abort") for each in (*self.running, *self.waiting)]
        self.waiting.clear()
        for sequence in list(self.running):
            self._retire(sequence)
        return outcomes

    def new_version(self) -> None:
        """Start a policy version after a change of weights, and drop everything kept for reuse."""
        self.version += 1
        self.cache.clear()

    def step(self) -> list[StepOutcome]:
        """Admit the sequences that fit, compute one forward pass, and sample."""
        self._admit()
        decoding, chunks = self._share_budget()
        if not decoding and not chunks:
            return []
        token_ids, wanted = self._row(decoding, chunks)
        caches = [(sequence, _kv(sequence)) for sequence, _ in chunks]
        packed = [Chunk(kv, count) for (_, kv), (_, count) in zip(caches, chunks, strict=True)]
        logits = self.model.forward(
            token_ids, [_kv(sequence) for sequence in decoding], packed, wanted
        )
        self.steps += 1
        self.computed_tokens += len(token_ids)
        return self._outcomes(decoding, chunks, logits)

    def _admit(self) -> None:
        """Start waiting sequences in their order. Those that wait for a prefix are skipped."""
        held: list[Generation] = []
        while self.waiting and len(self.running) < self.limits.max_running:
            if self.running and self._running_bytes() >= self.limits.kv_bytes:
                break
            sequence = self.waiting.popleft()
            if self._waits(sequence):
                held.append(sequence)
                continue
            sequence.kv = self._reused(sequence)
            sequence.cached_tokens = sequence.kv.length
            self.running.append(sequence)
        self.waiting.extendleft(reversed(held))

    def _waits(self, sequence: Generation) -> bool:
        """Return whether a running prompt computes a prefix that this sequence needs too."""
        if sequence.scores is not None:
            return False
        leader = sequence.waits_for
        if leader is not None:
            if leader.kv is not None and leader.kv.length < self._shareable(sequence, leader):
                return True
            sequence.waits_for = None
        for leader in self.running:
            computed = _kv(leader).length
            if computed >= len(leader.prompt_array):
                continue
            if self._shareable(sequence, leader) >= computed + _WORTH_WAITING:
                sequence.waits_for = leader
                return True
        return False

    def _shareable(self, sequence: Generation, leader: Generation) -> int:
        shared = shared_prefix(sequence.prompt_array, leader.prompt_array)
        return min(shared, len(sequence.prompt_array) - 1)

    def _reused(self, sequence: Generation) -> SequenceKV:
        """Return computed keys and values of the longest known beginning of the prompt.

        The prompt's last token is always computed, for its logits; with prompt logprobs, all are.
        """
        if sequence.scores is not None:
            return SequenceKV(self.version)
        limit = len(sequence.prompt_array) - 1
        best, length = None, 0
        for other in self.running:
            kv = _kv(other)
            shared = min(self._shareable(sequence, other), kv.length)
            if shared > length and kv.version == self.version:
                best, length = kv, shared
        kept = self.cache.take(sequence.prompt_array, limit, longer_than=length)
        if kept is not None:
            return kept
        return SequenceKV(self.version) if best is None else best.prefix(length)

    def _running_bytes(self) -> int:
        """Return the bytes of the running sequences, once their tokens so far are computed."""
        per_token = self.model.kv_bytes_per_token
        return sum(
            max(_kv(sequence).nbytes, len(sequence.tokens) * per_token) for sequence in self.running
        )

    def _share_budget(self) -> tuple[list[Generation], list[tuple[Generation, int]]]:
        """Return the sequences that decode in this step, and the others with a number of tokens.

        The number is that of a sequence's prompt tokens that are computed in this step.
        """
        decoding = [sequence for sequence in self.running if sequence.pending == 1]
        prompts = [sequence for sequence in self.running if sequence.pending > 1]
        budget = max(self.limits.step_tokens - len(decoding), 1)
        counts: list[int] = []
        for index, sequence in enumerate(prompts):
            # An equal share of what is left, at least one token, so that a long prompt delays a
            # short one by no more than the others do; what a short one leaves goes to the rest.
            share = max(budget // (len(prompts) - index), min(budget, 1))
            counts.append(min(share, sequence.pending))
            budget -= counts[-1]
        for index, sequence in enumerate(prompts):
            more = min(budget, sequence.pending - counts[index])
            counts[index] += more
            budget -= more
        return decoding, [
            (sequence, count) for sequence, count in zip(prompts, counts, strict=True) if count
        ]

    def _row(
        self, decoding: Iterable[Generation], chunks: Iterable[tuple[Generation, int]]
    ) -> tuple[list[int], list[int]]:
        """Return the row's token ids, and the row positions whose logits are needed."""
        token_ids = [sequence.tokens[-1] for sequence in decoding]
        wanted = list(range(len(token_ids)))
        for sequence, count in chunks:
            start = _kv(sequence).length
            begin = len(token_ids)
            token_ids += sequence.tokens[start : start + count]
            if sequence.scores is not None:
                wanted += range(begin, begin + count)
            elif count == sequence.pending:
                wanted.append(len(token_ids) - 1)
        return token_ids, wanted

    def _outcomes(
        self,
        decoding: Sequence[Generation],
        chunks: Sequence[tuple[Generation, int]],
        logits: torch.Tensor,
    ) -> list[StepOutcome]:
        """Score prompts and sample.

        ``logits`` are those of the positions that :meth:`_row` wanted.
        """
        ready = list(decoding)
        rows = list(range(len(ready)))
        at = len(ready)
        for sequence, count in chunks:
            done = sequence.pending == 0
            if sequence.scores is not None:
                self._score(sequence, logits[at : at + count])
                at += count
            else:
                at += done
            if done:
                ready.append(sequence)
                rows.append(at - 1)
        if not ready:
            return []
        if len(rows) != len(logits):
            logits = logits[rows]
        tokens = sample(logits, [_sampling_row(sequence) for sequence in ready])
        return [
            self._append(sequence, token) for sequence, token in zip(ready, tokens, strict=True)
        ]

    def _score(self, sequence: Generation, logits: torch.Tensor) -> None:
        """Add the logprobs of the prompt ids that follow a chunk's positions."""
        assert sequence.scores is not None  # noqa: S101 - the caller has looked
        first = len(sequence.scores)
        ids = sequence.prompt_array[first : first + len(logits)]
        logprobs = logits[: len(ids)].float().log_softmax(-1)
        chosen = torch.from_numpy(ids).to(logprobs.device)[:, None]
        own = logprobs.gather(-1, chosen)
        ranks = ((logprobs > own).sum(-1) + 1).tolist()
        count = sequence.sampling.prompt_logprobs or 0
        values, likeliest = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        sequence.scores += [
            PromptLogprob(int(token_id), value, rank, tuple(zip(top_ids, top, strict=True)))
            for token_id, value, rank, top_ids, top in zip(
                ids, own[:, 0].tolist(), ranks, likeliest.tolist(), values.tolist(), strict=True
            )
        ]

    def _append(self, sequence: Generation, token: SampledToken) -> StepOutcome:
        sequence.tokens.append(token.id)
        experts = _kv(sequence).experts(sequence.experts_from)
        sequence.experts_from = _kv(sequence).length
        finish: EngineFinishReason | None = None
        stop_token = None
        if token.id in self._eos and not sequence.sampling.ignore_eos:
            finish = "stop"
        elif token.id in sequence.sampling.stop_token_ids:
            finish, stop_token = "stop", token.id
        elif sequence.sampled >= sequence.sampling.max_tokens:
            finish = "length"
        if finish is not None:
            self._retire(sequence)
        return StepOutcome(sequence, token, finish, stop_token, experts)

    def _retire(self, sequence: Generation) -> None:
        self.running.remove(sequence)
        kv, sequence.kv = _kv(sequence), None
        if kv.version == self.version:
            self.cache.put(sequence.tokens, kv)
        self.cache.shrink(max(self.limits.kv_bytes - self._running_bytes(), 0))


def _kv(sequence: Generation) -> SequenceKV:
    assert sequence.kv is not None  # noqa: S101 - true of every running sequence
    return sequence.kv


def _sampling_row(sequence: Generation) -> SamplingRow:
    uniform = 0.0 if sequence.sampling.greedy else sequence.generator.random()
    return SamplingRow(sequence.sampling, uniform, sequence.tokens, len(sequence.prompt_array))
