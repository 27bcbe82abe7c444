"""A test of whether a policy computes packed tokens as it computes them alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.store.records import TokenIds
from bridle.trainer.batch.packing import make_packs
from bridle.trainer.batch.recurrence import forks_states
from bridle.trainer.config import PackingConfig
from bridle.trainer.policy.compute import is_rounded
from bridle.trainer.policy.model import (
    UnsupportedModel,
    score_pack,
    score_sequence,
    vocabulary_size,
)

log = logging.getLogger(__name__)

PROBE_TOLERANCE: Final = 1e-4
"""Largest difference of a logprob between packed tokens and lone ones, relative to the largest.
Numerical noise of float32 is below 1e-5. Layers that mix what is packed together are above 3e-4
with weights as they are at initialisation, and far above once they are trained."""
ROUNDED_TOLERANCE: Final = 5e-3
"""The same in bfloat16, between a sequence packed with one and the same packed with another. Ten
times as much is allowed against the sequence alone, which other kernels compute."""
ATTENTION_KINDS: Final = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, as Transformers names them, that see a token's ancestors only."""
PROBED_REACH: Final = {"sliding_window": 6, "attention_chunk_size": 6}
"""Settings that say how many tokens such a layer sees, and their values while a model is probed:
fewer than the branches of a probe share, and than each has of its own."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A sequence of which every token but the first is scored."""

    token_ids: TokenIds
    mask: NDArray[np.bool_]


def exact_packing(model: nn.Module, packing: PackingConfig) -> PackingConfig:
    """Return ``packing``, or a row for each sample if tokens packed so are not scored as alone.

    Attention receives the ancestors of each token, all of them or those in a window or a chunk
    (:mod:`bridle.trainer.batch.attention`), and so does Gated DeltaNet
    (:mod:`bridle.trainer.batch.recurrence`); other recurrent layers (Mamba, LFM2) take in whatever
    stands before a token. Raises :class:`UnsupportedModel` if rows do not give the
    model's own scores either.
    """
    rows = replace(packing, layout="padded")
    wrong = _why_unpackable(model) if packing != rows else None
    wrong = wrong or _why_inexact(model, packing)
    if wrong is None:
        return packing
    # FSDP2 makes a class of its own.
    name = type(model).__name__.removeprefix("FSDP")
    wrong_rows = wrong if packing == rows else _why_inexact(model, rows)
    if wrong_rows is not None:
        raise UnsupportedModel(f"{name} cannot be trained exactly: {wrong_rows}")
    log.warning(
        "%s is trained in padded rows, which share no prefix; packed as %s: %s",
        name,
        packing.layout,
        wrong,
    )
    return rows


def _why_unpackable(model: nn.Module) -> str | None:
    """Return why the kinds of the model's layers rule out packing, or ``None``.

    At initialisation, layers that mix what is packed together may change logprobs by too little for
    :func:`_why_inexact`.
    """
    kinds = set(getattr(_config(model), "layer_types", None) or ())
    unpackable = kinds - ATTENTION_KINDS
    if forks_states(model):
        unpackable -= {"linear_attention"}
    return f"it has layers of {', '.join(sorted(unpackable))}" if unpackable else None


@torch.no_grad()
def _why_inexact(model: nn.Module, packing: PackingConfig) -> str | None:
    """Return how packed scores differ from those of sequences alone, or ``None`` if they agree.

    Two branches of a packed tree are compared with the same two alone, and the second of them with
    itself beside another one. The second comparison is as sharp in bfloat16 as in float32.
    """
    known = vocabulary_size(model)
    first, second, other = (
        _Probe(np.asarray([*range(8), *tail], np.uint32) % known, np.arange(24) > 0)
        for tail in (range(8, 24), range(24, 40), [8] * 16)
    )
    try:
        with _short_reach(model):
            alone = [
                score_sequence(model, each.token_ids.astype(np.int64)) for each in (first, second)
            ]
            found = _packed_scores(model, first, second, packing)
            beside_other = _packed_scores(model, other, second, packing)[1]
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    expected = torch.stack(alone).to(found)
    largest = expected.abs().max()
    gap = float((found - expected).abs().max() / largest)
    rounded = is_rounded(model)
    if not gap <= (10 * ROUNDED_TOLERANCE if rounded else PROBE_TOLERANCE):
        return f"its logprobs differ by {gap:.2g} of the largest from those of a sequence alone"
    # Rows cannot mix, and some noise depends on how many tokens an expert is given.
    change = float((beside_other - found[1]).abs().max() / largest)
    if packing.layout != "padded" and not change <= (
        ROUNDED_TOLERANCE if rounded else PROBE_TOLERANCE
    ):
        return f"its logprobs change by {change:.2g} of the largest with what is packed beside them"
    return None


@contextmanager
def _short_reach(model: nn.Module) -> Iterator[None]:
    """Let windows and chunks be smaller than a probe, whose masks are made when it is computed."""
    config = _config(model)
    own = {name: each for name in PROBED_REACH if (each := getattr(config, name, None)) is not None}
    try:
        for name, value in own.items():
            setattr(config, name, min(value, PROBED_REACH[name]))
        yield
    finally:
        for name, value in own.items():
            setattr(config, name, value)


def _packed_scores(
    model: nn.Module, first: _Probe, second: _Probe, packing: PackingConfig
) -> Tensor:
    """Return the logprobs of both from one pack, ``float[2, T - 1]``."""
    (pack,) = make_packs([first, second], replace(packing, max_tokens=1024))
    scores = score_pack(model, pack, block_tokens=packing.block_tokens).logprobs
    packed = torch.empty(2, len(first.token_ids) - 1).to(scores)
    packed[pack.samples, pack.offsets - 1] = scores
    return packed


def _config(model: nn.Module) -> Any:
    """Return Transformers' configuration of the language model, which has no types."""
    model_config: Any = model.config
    return model_config.get_text_config()
