"""Attention over a forest of tokens: each token sees its ancestors and itself.

The functions here are registered with Transformers as the attention implementation
:data:`TREE_ATTENTION`. Inside :func:`in_trees` they compute a pack; elsewhere they are its
own SDPA, so that the same model also generates and takes padded rows.

What a layer's tokens see of their own branch is the model's to say. Transformers makes a mask for
each kind of layer (full, with a sliding window, chunked) from a function of two positions. In a
pack that function is asked for the first position that each position sees, and the layers get a
:class:`LayerPlan` in place of a mask. A CPU computes full attention in parts without masks
(:mod:`bridle.trainer.batch.spans`), and a CUDA device in 16 bits uses FlexAttention
(:mod:`bridle.trainer.batch.flex`). FlexAttention takes minutes to compile for float32, so CUDA in
float32, like other devices and a CPU's other kinds of layers, uses blocks with small masks
(:mod:`bridle.trainer.batch.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from bridle.trainer.batch.blocks import TreeBlocks, block_attention, plan_blocks
from bridle.trainer.batch.flex import TreeMask, flex_tree_attention, plan_mask
from bridle.trainer.batch.forest import Reach
from bridle.trainer.batch.packing import Pack
from bridle.trainer.batch.scored import scored_attention
from bridle.trainer.batch.spans import TreeSpans, plan_tree_spans, span_attention

TREE_ATTENTION: Final = "bridle_tree"

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
"""A function that returns which positions are seen, as Transformers states it.

It takes indices of a row and of a head, and two tensors of positions, and returns whether the
second is seen from the first."""


@dataclass(frozen=True)
class LayerPlan:
    """The attention of a pack in the layers of one kind; each way to compute it is planned once."""

    pack: Pack
    block_tokens: int
    device: torch.device
    dtype: torch.dtype
    reach: Reach | None
    """The ancestors that each token sees; ``None`` if it sees all."""

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of ``query`` ``[1, H, N, D]`` to ``key``, ``value`` ``[1, G, N, D]``.

        Returns ``[1, H, N, D]``. Keys and values may differ in ``D``; the result's is the values'.
        """
        if self.device.type == "cuda" and self.dtype in {torch.bfloat16, torch.float16}:
            return flex_tree_attention(query, key, value, self._mask, scale, softcap, sinks)
        plain = self.reach is None and softcap is None and sinks is None
        if self.device.type == "cpu" and plain:
            return span_attention(query, key, value, self._spans.of(module), scale)
        return block_attention(query, key, value, self._blocks, scale, softcap, sinks)

    @cached_property
    def _mask(self) -> TreeMask:
        return plan_mask(self.pack.parents, self.device, self.dtype, self.reach)

    @cached_property
    def _spans(self) -> TreeSpans:
        return plan_tree_spans(self.pack.parents, self.pack.sources, self.block_tokens, self.dtype)

    @cached_property
    def _blocks(self) -> TreeBlocks:
        return plan_blocks(
            self.pack.parents, self.block_tokens, self.device, self.dtype, self.reach
        )


class TreePlans:
    """The attention of a pack in a whole model: a plan for each kind of layer.

    ``dtype`` is the type that the model multiplies in.
    """

    def __init__(
        self, pack: Pack, block_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._arguments = (pack, block_tokens, device, dtype)
        self._plans: dict[bytes, LayerPlan] = {}

    def of(self, sees: MaskFunction) -> LayerPlan:
        """Return the plan of layers with the masks that ``sees`` makes. Raises ``ValueError``."""
        pack, _, device, _ = self._arguments
        firsts = first_seen(sees, int(pack.positions.max()) + 1, device)
        reach = Reach(pack.positions, firsts[pack.positions]) if firsts.any() else None
        return self._plans.setdefault(firsts.tobytes(), LayerPlan(*self._arguments, reach))


def first_seen(
    sees: MaskFunction, length: int, device: torch.device | str = "cpu"
) -> NDArray[np.int64]:
    """Return the first position that each position sees, ``int64[length]``.

    A position sees those from the first to itself: all, a window or the present chunk. The first is
    found by bisection. Raises ``ValueError`` if a later position is seen.
    """
    positions = torch.arange(length, device=device)
    if not sees(0, 0, positions, positions).all() or sees(0, 0, positions, positions + 1).any():
        raise ValueError("it has layers in which a token sees later ones, or not itself")
    low, high = torch.zeros_like(positions), positions.clone()
    while bool((low < high).any()):
        middle = (low + high) // 2
        seen = sees(0, 0, positions, middle)
        low, high = torch.where(seen, low, middle + 1), torch.where(seen, middle, high)
        low = torch.minimum(low, high)
    firsts: NDArray[np.int64] = high.cpu().numpy()
    return firsts


_plans: ContextVar[TreePlans | None] = ContextVar("tree_plans", default=None)


@contextmanager
def in_trees(plans: TreePlans) -> Iterator[None]:
    """Let models compute the tokens of a pack, given with a mask ``[1, N]`` of ones."""
    token = _plans.set(plans)
    try:
        yield
    finally:
        _plans.reset(token)


def _transformers_mask(**kwargs: Any) -> Any:
    """Return what the layers of one kind receive as their mask.

    An error is for the layers too: Qwen2-MoE makes masks of a kind that no layer has.
    """
    plans = _plans.get()
    if plans is None:
        return sdpa_mask(**kwargs)
    try:
        return plans.of(kwargs["mask_function"])
    except ValueError as error:
        return error


def _transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LayerPlan | ValueError | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that Transformers calls.

    Return ``[batch, tokens, heads, dim]``.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if isinstance(attention_mask, LayerPlan):
        attended = attention_mask.attend(module, query, key, value, scaling, softcap, sinks)
        return attended.transpose(1, 2).contiguous(), None
    if isinstance(attention_mask, ValueError):
        raise attention_mask
    if _plans.get() is not None:
        raise ValueError("it has layers whose masks Transformers' functions do not make")
    if softcap is not None or sinks is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scored = scored_attention(query, key, value, attention_mask, scale, softcap, sinks)
        return scored.transpose(1, 2).contiguous(), None
    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return output


AttentionInterface.register(TREE_ATTENTION, _transformers_attention)
AttentionMaskInterface.register(TREE_ATTENTION, _transformers_mask)
