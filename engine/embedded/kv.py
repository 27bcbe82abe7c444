"""Keys and values of token sequences, and the finished ones that are kept for reuse.

A sequence owns one buffer per layer, ``[kv_heads, capacity, key_dim + value_dim]``, that grows by
half when it is full; a step writes only its new tokens. A finished sequence's buffers go to the
:class:`PrefixCache`; a prompt that begins with the same tokens takes them over, or copies the part
that it shares.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GRANULE = 64
"""The number of tokens of which capacities are multiples."""
_EXPERTS = -1
"""The place, among the layers, of the experts that computed each token."""


class SequenceKV:
    """Computed keys and values of one sequence's first ``length`` tokens."""

    def __init__(self, version: int) -> None:
        self.length = 0
        self.version = version
        """The policy version that computed them."""
        self._capacity = 0
        self._layers: dict[int, torch.Tensor] = {}
        self._experts_shape: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._layers.values())

    @property
    def bytes_per_token(self) -> int:
        return self.nbytes // max(self._capacity, 1)

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in all."""
        if length <= self._capacity:
            return
        wanted = max(length, self._capacity + self._capacity // 2)
        self._capacity = -(-wanted // _GRANULE) * _GRANULE
        for index, buffer in self._layers.items():
            self._layers[index] = self._grown(buffer)

    def layer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer of one layer; made like ``[kv_heads, tokens, dims]`` on first use."""
        buffer = self._layers.get(index)
        if buffer is None:
            heads, _, dims = like.shape
            buffer = self._layers[index] = like.new_empty((heads, self._capacity, dims))
        return buffer

    def note_experts(self, experts: torch.Tensor) -> None:
        """Keep the experts of the next tokens, ``int16[tokens, layers, top_k]``."""
        self._experts_shape = experts.shape[1:]
        rows = experts.reshape(1, len(experts), -1)
        self.layer(_EXPERTS, rows)[:, self.length : self.length + len(experts)] = rows

    def experts(self, start: int) -> NDArray[np.int16] | None:
        """Return the experts of the tokens from ``start`` on, ``int16[tokens, layers, top_k]``.

        Return ``None`` if the model has none.
        """
        buffer = self._layers.get(_EXPERTS)
        if buffer is None:
            return None
        rows = buffer[0, start : self.length].cpu().numpy()
        return rows.reshape(len(rows), *self._experts_shape).copy()

    def prefix(self, length: int) -> SequenceKV:
        """Return a copy of the first ``length`` tokens."""
        copy = SequenceKV(self.version)
        copy.reserve(length + _GRANULE)
        for index, buffer in self._layers.items():
            copy._layers[index] = copy._grown(buffer[:, :length])
        copy._experts_shape = self._experts_shape
        copy.length = length
        return copy

    def _grown(self, buffer: torch.Tensor) -> torch.Tensor:
        heads, length, dims = buffer.shape
        grown = buffer.new_empty((heads, self._capacity, dims))
        grown[:, :length] = buffer
        return grown


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: NDArray[np.int64]
    kv: SequenceKV


class PrefixCache:
    """Finished sequences, least recently used first; at most ``max_bytes`` of buffers."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def take(
        self, prompt: NDArray[np.int64], limit: int, *, longer_than: int = 0
    ) -> SequenceKV | None:
        """Return keys and values of the longest kept beginning of ``prompt``.

        They are of at most ``limit`` tokens. A sequence that the prompt extends is handed over. The
        shared part of a longer one is copied, so that others can still use it. Return ``None`` if
        none is longer than ``longer_than``.
        """
        best, best_length = None, longer_than
        for key, entry in self._entries.items():
            length = min(shared_prefix(prompt, entry.tokens), limit)
            if length > best_length:
                best, best_length = key, length
        if best is None:
            return None
        entry = self._entries[best]
        if best_length == len(entry.tokens):
            del self._entries[best]
            self.nbytes -= entry.kv.nbytes
            return entry.kv
        self._entries.move_to_end(best)
        return entry.kv.prefix(best_length)

    def put(self, tokens: Sequence[int], kv: SequenceKV) -> None:
        """Keep a finished sequence; ``tokens`` are the computed ones."""
        if not kv.length or kv.nbytes > self.max_bytes:
            return
        self._added += 1
        self._entries[self._added] = _Entry(np.asarray(tokens[: kv.length], np.int64), kv)
        self.nbytes += kv.nbytes
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used sequences until at most ``max_bytes`` are left."""
        while self._entries and self.nbytes > max_bytes:
            _, entry = self._entries.popitem(last=False)
            self.nbytes -= entry.kv.nbytes

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0


def shared_prefix(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Return the number of tokens that two sequences have in common from their beginning."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
