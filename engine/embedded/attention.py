"""Attention over many sequences packed into one row of tokens.

Transformers' models call an *attention interface* by name; ours is ``bridle_ragged``. The model
sees one row of ``N`` tokens, and everything but attention treats them alike. Attention takes the
row apart again: the batch records which tokens belong to which sequence, whose earlier keys and
values are in its :class:`SequenceKV`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bridle.engine.embedded.kv import SequenceKV

ATTENTION_NAME: Final = "bridle_ragged"


@dataclass(slots=True)
class Chunk:
    """``count`` consecutive new tokens of one sequence, after ``kv.length`` computed ones."""

    kv: SequenceKV
    count: int
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor:
        """Return ``bool[count, kv.length + count]``: the keys that each new token may see."""
        mask = self._masks.get(window)
        if mask is None:
            total = self.kv.length + self.count
            query = torch.arange(self.kv.length, total, device=device)[:, None]
            key = torch.arange(total, device=device)[None, :]
            mask = key <= query
            if window is not None:
                mask &= key > query - window
            self._masks[window] = mask
        return mask


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The composition of the row of tokens.

    First comes one token of each decoding sequence. The chunks of the sequences whose prompts are
    being computed follow.
    """

    decoding: tuple[SequenceKV, ...]
    chunks: tuple[Chunk, ...]


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged: RaggedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with ``query [1, H, N, D]``, ``key`` and ``value [1, KH, N, D]``.

    Return ``[1, N, H, D]``.

    The new keys and values are written into the sequences' buffers, which must have room for them.
    """
    if ragged is None or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention with soft caps or sinks, or without a batch")
    heads, tokens, _ = query.shape[1:]
    kv_heads, _, key_dim = key.shape[1:]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    new = torch.cat((key[0], value[0]), dim=-1)
    decoding = len(ragged.decoding)
    outputs: list[torch.Tensor] = []
    if decoding:
        # A decoding token's query heads share their group's keys: [KH, H / KH, D].
        rows = query[0, :, :decoding].transpose(0, 1)
        rows = rows.reshape(decoding, 1, kv_heads, heads // kv_heads, -1)
        steps = new[:, :decoding].unbind(1)
        attended = []
        for kv, row, step in zip(ragged.decoding, rows.unbind(0), steps, strict=True):
            end = kv.length + 1
            buffer = kv.layer(layer, new)
            buffer[:, kv.length] = step
            start = 0 if sliding_window is None else max(0, end - sliding_window)
            seen = buffer[None, :, start:end]
            attended.append(
                scaled_dot_product_attention(
                    row, seen[..., :key_dim], seen[..., key_dim:], scale=scaling
                )
            )
        outputs.append(torch.cat(attended).reshape(decoding, heads, -1))
    at = decoding
    for chunk in ragged.chunks:
        start, end = chunk.kv.length, chunk.kv.length + chunk.count
        buffer = chunk.kv.layer(layer, new)
        buffer[:, start:end] = new[:, at : at + chunk.count]
        seen = buffer[None, :, :end]
        result = scaled_dot_product_attention(
            query[:, :, at : at + chunk.count],
            seen[..., :key_dim],
            seen[..., key_dim:],
            attn_mask=chunk.mask(sliding_window, query.device),
            scale=scaling,
            enable_gqa=heads != kv_heads,
        )
        outputs.append(result[0].transpose(0, 1))
        at += chunk.count
    assert at == tokens  # noqa: S101 - the batch describes the whole row
    return torch.cat(outputs)[None], None


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
