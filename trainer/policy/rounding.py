"""Rounding of weights to the 16-bit types that a policy's own directory keeps them in.

Training keeps float32, where small updates add up. An engine in 16 bits rounds what it loads, so a
published directory in float32 would be twice as large and serve the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

_IN_16_BITS: Final = {"BF16": torch.bfloat16, "F16": torch.float16}
"""The 16-bit types by the names that safetensors has for them."""


def stored_in_16_bits(directory: Path) -> dict[str, torch.dtype]:
    """Return the types of the weights that a model directory keeps in 16 bits, by name.

    The weights are those of the directory's safetensors. No weight is read.
    """
    found: dict[str, torch.dtype] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                kept = _IN_16_BITS.get(file.get_slice(name).get_dtype())
                if kept is not None:
                    found[name] = kept
    return found


def rounded_as(tensors: Mapping[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Return ``tensors``, under a checkpoint's names, in 16 bits where ``directory`` keeps them so.

    Others are as they were: some families keep a few of their weights in float32.
    """
    kept = stored_in_16_bits(directory)
    return {name: tensor.to(kept.get(name, tensor.dtype)) for name, tensor in tensors.items()}
