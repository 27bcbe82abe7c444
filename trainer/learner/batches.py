"""The packs of one optimizer update, with all that their loss needs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.errors import BridleError
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.samples.samplers import unscored
from bridle.trainer.batch.packing import Index, Pack, make_packs, with_routing
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit.weighting import branch_token_weights
from bridle.trainer.losses.terms import TokenTerms
from bridle.trainer.policy.drawn import Drawn
from bridle.trainer.policy.model import TokenScores, score_idly, score_pack

_PLAIN: Final = np.asarray([1.0, 1.0, 0.0, 0.0])
"""Temperature, top-p, top-k and min-p of the policy's own distribution."""
_NO_IDS: Final = np.empty(0, np.uint32)


class UnscoredSampler(BridleError, ValueError):
    """A token to be trained was drawn from a distribution that the trainer does not compute."""


@dataclass(frozen=True, slots=True)
class TrainPack:
    """A pack and, for each of its ``M`` targets, the inputs of its loss besides the policy."""

    pack: Pack
    samples: Sequence[Sample]
    """The packed samples."""
    advantages: Tensor
    """``float32[M]``"""
    weights: Tensor
    """``float32[M]``: weights of one loss over all packs of a minibatch."""
    behaviour_logprobs: Tensor
    """``float32[M]``: the engine's logprobs."""
    versions: Tensor
    """``int64[M]``"""
    drawn: Drawn | None = None
    """The distributions that the targets were drawn from; ``None`` if each is the policy's own."""
    old_logprobs: Tensor | None = None
    """``float32[M]``: this policy's logprobs before the step's first update, or ``None`` if it has
    not changed yet."""
    entropies: Tensor | None = None
    """``float32[M]``: the entropies that belong to ``old_logprobs``."""
    reference_logprobs: Tensor | None = None


def deal_minibatches(
    items: Sequence[TrainItem], minibatches: int, seed: Sequence[int]
) -> list[list[TrainItem]]:
    """Deal whole groups into at most ``minibatches`` parts of similar size, by ``seed``."""
    groups: dict[Hashable, list[TrainItem]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    shuffled = list(groups.values())
    np.random.default_rng(list(seed)).shuffle(shuffled)
    parts: list[list[TrainItem]] = [[] for _ in range(min(minibatches, len(shuffled)))]
    for group in shuffled:
        min(parts, key=len).extend(group)
    return parts


def pack_minibatch(items: Sequence[TrainItem], config: GrpoConfig) -> list[TrainPack]:
    """Return the packs of one optimizer update."""
    samples = [item.sample for item in items]
    packs = make_packs(samples, config.packing)
    if config.replay_routing == "auto":
        packs = [with_routing(pack, samples) for pack in packs]
    _, sessions = np.unique([item.session for item in items], return_inverse=True)
    weights = branch_token_weights(
        np.asarray([int(item.sample.mask.sum()) for item in items]),
        sessions,
        config.loss.weighting,
        config.loss.constant_tokens,
    )
    return [_train_pack(pack, items, weights) for pack in packs]


def _train_pack(
    pack: Pack,
    items: Sequence[TrainItem],
    weights: NDArray[np.float64],
) -> TrainPack:
    behaviour = np.empty(len(pack.samples), dtype=np.float32)
    versions = np.empty(len(pack.samples), dtype=np.int64)
    advantages = np.empty(len(pack.samples), dtype=np.float32)
    drawn = np.tile(_PLAIN, (len(pack.samples), 1))
    for index in np.unique(pack.samples):
        here = pack.samples == index
        drawn[here] = _drawn(items[index].sample, pack.offsets[here])
        behaviour[here] = items[index].sample.logprobs[pack.offsets[here]]
        advantages[here] = items[index].credit[pack.offsets[here]]
        versions[here] = items[index].sample.versions[pack.offsets[here]]
    return TrainPack(
        pack=pack,
        samples=[item.sample for item in items],
        advantages=torch.from_numpy(advantages),
        weights=torch.from_numpy(weights[pack.samples]).float(),
        behaviour_logprobs=torch.from_numpy(behaviour),
        versions=torch.from_numpy(versions),
        drawn=_drawn_from(drawn, [items[index].sample for index in pack.samples], pack.offsets),
    )


def _drawn_from(
    settings: NDArray[np.float64], samples: Sequence[Sample], offsets: Index
) -> Drawn | None:
    """Return what the tokens at ``offsets`` of ``samples`` were drawn from."""
    kept = [
        _NO_IDS if sample.kept is None else sample.kept.of_token(int(offset))
        for sample, offset in zip(samples, offsets, strict=True)
    ]
    if (settings == _PLAIN).all() and not any(map(len, kept)):
        return None
    counts = torch.tensor([len(ids) for ids in kept])
    ids = np.concatenate([_NO_IDS, *kept]).astype(np.int64)
    return Drawn(torch.from_numpy(settings), counts, torch.from_numpy(ids))


def _drawn(sample: Sample, offsets: Index) -> NDArray[np.float64]:
    """Return the sampler settings that these tokens of a sample were drawn at.

    The settings are ``float64[len(offsets), 4]``.
    """
    table = np.tile(_PLAIN, (len(sample.call_ids), 1))
    trained = set(sample.calls[offsets].tolist())
    for place, sampler in enumerate(sample.samplers):
        if sampler is not None and place in trained:
            if (reason := unscored(sampler)) is not None:
                raise UnscoredSampler(
                    f"call {sample.call_ids[place]} was drawn at {sampler.label} ({reason}), which "
                    "is not scored: train under the rule samplers=scored"
                )
            table[place] = sampler.temperature, sampler.top_p, sampler.top_k, sampler.min_p
    return table[sample.calls[offsets]]


Turns = Sequence[TrainPack | None]
"""The packs that this process computes, one per turn. ``None`` marks a turn without a pack, while
other processes have one."""


def with_old_logprobs(model: nn.Module, turns: Turns, block_tokens: int) -> Turns:
    """Return the packs with the policy's present scores, for comparison after it has changed."""
    return [
        None
        if pack is None or scores is None
        else replace(pack, old_logprobs=scores.logprobs, entropies=scores.entropies)
        for pack, scores in _frozen(model, turns, block_tokens)
    ]


def with_reference_logprobs(reference: nn.Module, turns: Turns, block_tokens: int) -> Turns:
    """Return the packs with the reference policy's logprobs, for the KL penalty."""
    return [
        None
        if pack is None or scores is None
        else replace(pack, reference_logprobs=scores.logprobs)
        for pack, scores in _frozen(reference, turns, block_tokens)
    ]


@torch.no_grad()
def _frozen(
    model: nn.Module, turns: Turns, block_tokens: int
) -> Iterator[tuple[TrainPack | None, TokenScores | None]]:
    for pack in turns:
        if pack is None:
            score_idly(model)
            yield None, None
        else:
            yield pack, score_pack(model, pack.pack, block_tokens=block_tokens, drawn=pack.drawn)


def loss_terms(pack: TrainPack, scores: TokenScores) -> TokenTerms:
    """Bring a pack's numbers and the policy's scores together, on the policy's device and dtype."""
    like = scores.logprobs
    old = scores.logprobs.detach() if pack.old_logprobs is None else pack.old_logprobs
    return TokenTerms(
        logprobs=scores.logprobs,
        old_logprobs=old.to(like),
        behaviour_logprobs=pack.behaviour_logprobs.to(like),
        advantages=pack.advantages.to(like),
        weights=pack.weights.to(like),
        branches=torch.from_numpy(pack.pack.samples).to(like.device),
        reference_logprobs=None
        if pack.reference_logprobs is None
        else pack.reference_logprobs.to(like),
        entropies=scores.entropies.to(like),
    )
