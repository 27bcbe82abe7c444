"""One step's optimizer updates: for each minibatch forward, loss, backward, step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from bridle.store.trained import SpanScores
from bridle.trainer.batch.packing import computed_tokens, longest_branch
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.batches import (
    TrainPack,
    Turns,
    deal_minibatches,
    loss_terms,
    pack_minibatch,
    with_old_logprobs,
    with_reference_logprobs,
)
from bridle.trainer.learner.optimizer import clip_and_step
from bridle.trainer.learner.scores import span_scores
from bridle.trainer.losses.drift import Drift
from bridle.trainer.losses.losses import LossSums, needs_entropy_gradient, policy_loss
from bridle.trainer.policy.lora import without_adapters
from bridle.trainer.policy.model import TokenScores, score_idly, score_pack
from bridle.trainer.policy.sharding import share_of
from bridle.trainer.policy.sparse import require_within_index


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|engine logprob − trainer logprob| of the tokens sampled at the version in training."""

    total: float = 0.0
    tokens: int = 0
    largest: float = 0.0

    def __add__(self, other: LogprobGap) -> LogprobGap:
        return LogprobGap(
            self.total + other.total,
            self.tokens + other.tokens,
            max(self.largest, other.largest),
        )

    @property
    def mean(self) -> float | None:
        """The mean gap, or ``None`` if no token was sampled at this version."""
        return self.total / self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """The statistics of a step's updates."""

    loss: LossSums = field(default_factory=LossSums)
    """Sums over all updates of the step."""
    entropy: float = 0.0
    """Sum of the entropies over tokens, in nats."""
    gap: LogprobGap = field(default_factory=LogprobGap)
    drift: Drift = field(default_factory=Drift)
    grad_norms: tuple[float, ...] = ()
    """Gradient norm of each update, before clipping."""
    kind_norms: tuple[Mapping[str, float], ...] = ()
    """The same by kinds of layers (:mod:`bridle.trainer.learner.gradients`)."""
    skipped_updates: int = 0
    """Number of updates not taken because the gradient was not finite."""
    computed_tokens: int = 0
    """Number of tokens of a pass over all packs."""
    unshared_tokens: int = 0
    """Number of tokens of this pass if prefixes were not shared."""
    packs: int = 0
    entropy_bonus: float = 0.0
    """The coefficient of the entropy bonus in these updates."""
    scoring_seconds: float = 0.0
    """Seconds spent on the old and reference policies' logprobs, before the first update."""
    scores: tuple[SpanScores, ...] = ()
    """The policy's scores of the trained tokens before the first update, pack by pack; empty if the
    run does not keep them."""

    @property
    def mean_entropy(self) -> float:
        """The mean entropy of the trained tokens, in nats."""
        return self.entropy / self.loss["tokens"]

    @property
    def changed_weights(self) -> bool:
        """Return whether any update was taken."""
        return self.skipped_updates < len(self.grad_norms)

    def __add__(self, other: UpdateStats) -> UpdateStats:
        return replace(
            self,
            loss=self.loss + other.loss,
            entropy=self.entropy + other.entropy,
            gap=self.gap + other.gap,
            drift=self.drift + other.drift,
            grad_norms=self.grad_norms + other.grad_norms,
            kind_norms=self.kind_norms + other.kind_norms,
            skipped_updates=self.skipped_updates + other.skipped_updates,
            scores=self.scores + other.scores,
        )

    @classmethod
    def of_processes(cls, parts: Sequence[UpdateStats]) -> UpdateStats:
        """Combine the statistics of several processes, each with packs of its own."""
        total = parts[0]
        for part in parts[1:]:
            total += UpdateStats(
                loss=part.loss,
                entropy=part.entropy,
                gap=part.gap,
                drift=part.drift,
                scores=part.scores,
            )
        return total


def update_policy(
    model: nn.Module,
    optimizer: Optimizer,
    items: Sequence[TrainItem],
    config: GrpoConfig,
    *,
    step: int,
    version: int,
    reference: nn.Module | None = None,
    entropy_bonus: float = 0.0,
) -> UpdateStats:
    """Train ``model``, whose weights are those of ``version``, on ``items``.

    With a single update the policy's own forward pass is ``π_old``; with more, the logprobs of
    ``π_old`` are taken for all minibatches before the first. With several processes, each computes
    its own packs and returns their sums. ``reference`` computes with its adapters off, so it may be
    ``model``.
    """
    block_tokens = config.packing.block_tokens
    started = time.perf_counter()
    packed = [
        pack_minibatch(part, config)
        for part in deal_minibatches(items, config.minibatches, (config.seed, step))
    ]
    packs = [pack for minibatch in packed for pack in minibatch]
    # Before they are dealt out, so that every process refuses the same.
    require_within_index(model, max((longest_branch(pack.pack) for pack in packs), default=0))
    share = share_of(model)
    dealt = [share.of(minibatch, _size) for minibatch in packed]
    minibatches: list[Turns] = [*dealt]
    if reference is not None:
        with without_adapters(reference):
            minibatches = [with_reference_logprobs(reference, m, block_tokens) for m in minibatches]
    if len(minibatches) * config.epochs > 1:
        minibatches = [with_old_logprobs(model, m, block_tokens) for m in minibatches]
    stats = UpdateStats(
        computed_tokens=sum(map(_size, packs)),
        unshared_tokens=sum(pack.pack.unshared_tokens for pack in packs),
        packs=len(packs),
        entropy_bonus=entropy_bonus,
        scoring_seconds=time.perf_counter() - started,
    )
    for epoch in range(config.epochs):
        for minibatch in minibatches:
            stats += _update(
                model,
                optimizer,
                minibatch,
                config,
                version=version if epoch == 0 else None,
                entropy_bonus=entropy_bonus,
            )
    return stats


def _size(pack: TrainPack) -> int:
    return computed_tokens(pack.pack)


def _update(
    model: nn.Module,
    optimizer: Optimizer,
    turns: Turns,
    config: GrpoConfig,
    *,
    version: int | None,
    entropy_bonus: float,
) -> UpdateStats:
    """Accumulate the gradients of the packs and take one optimizer step.

    ``version`` is the version whose tokens' gap is measured, along with the drift and the scores of
    all tokens; ``None`` if all have been measured.
    """
    stats = UpdateStats()
    for pack in turns:
        if pack is None:
            score_idly(model)
            continue
        scores = score_pack(
            model,
            pack.pack,
            block_tokens=config.packing.block_tokens,
            drawn=pack.drawn,
            entropy_gradient=bool(entropy_bonus) or needs_entropy_gradient(config.loss),
        )
        terms = loss_terms(pack, scores)
        loss, sums = policy_loss(terms, config.loss, entropy_bonus)
        loss.backward()  # type: ignore[no-untyped-call]
        stats += UpdateStats(loss=sums, entropy=float(scores.entropies.detach().sum()))
        if version is not None:
            old = terms.old_logprobs.detach()
            ours = pack.versions >= 0  # not those that another run sampled
            drift = Drift.of(
                old[ours], terms.behaviour_logprobs[ours], version - pack.versions[ours]
            )
            kept = _kept(pack, scores, old, version) if config.token_scores else ()
            stats += UpdateStats(gap=_gap(pack, old, version), drift=drift, scores=kept)
    step = clip_and_step(model, optimizer, config.optimizer.grad_clip)
    return stats + UpdateStats(
        grad_norms=(step.norm,), kind_norms=(step.by_kind,), skipped_updates=0 if step.taken else 1
    )


def _kept(
    pack: TrainPack, scores: TokenScores, old_logprobs: Tensor, version: int
) -> tuple[SpanScores, ...]:
    """Return the scores of a pack's tokens by the weights of ``version``, for the store."""
    uncertainty = scores.entropies if pack.entropies is None else pack.entropies
    logprobs, entropies = (
        each.detach().float().cpu().numpy() for each in (old_logprobs, uncertainty)
    )
    return tuple(span_scores(pack.pack, pack.samples, logprobs, entropies, version))


def _gap(pack: TrainPack, old_logprobs: Tensor, version: int) -> LogprobGap:
    """Return the gap of the tokens sampled at ``version``.

    ``old_logprobs`` are the policy's before the first update, so at ``version``.
    """
    current = pack.versions == version
    if not bool(current.any()):
        return LogprobGap()
    gaps = (old_logprobs.detach().cpu() - pack.behaviour_logprobs)[current].abs()
    return LogprobGap(float(gaps.sum()), int(current.sum()), float(gaps.max()))
