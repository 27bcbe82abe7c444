"""The amounts that a model computes, reads and keeps.

They are found from its configuration and the headers of its weights.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bridle.errors import UsageError

_LONGEST_HEADER: Final = 100 << 20
"""Maximum bytes of a header, which is the format's own bound."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameters: int
    multiplied: int
    """Number of parameters with which a token is multiplied. Of the experts, only those count that
    a token is sent to; of the tables of embeddings, only the one that makes logits."""
    weight_bytes: int
    """Bytes of the weights as they are stored."""
    cache_elements: int
    """Number of values that one token leaves in the key-value cache, over all layers."""
    attention_flops: int
    """Operations of one token for each token before it."""

    @property
    def element_bytes(self) -> float:
        """Bytes of one weight, and of one value in the cache."""
        return self.weight_bytes / self.parameters

    @property
    def cache_bytes(self) -> float:
        """Bytes of one token in the key-value cache."""
        return self.cache_elements * self.element_bytes


def model_size(directory: Path) -> ModelSize:
    """Return the size of the model in a directory, whose weights are safetensors.

    Layers with a sliding window count as if they attended to everything, so that caches are not
    larger than planned. Raise :class:`bridle.errors.UsageError`.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory}/config.json cannot be read: {error}") from error
    config = config.get("text_config", config)
    if "kv_lora_rank" in config:
        raise UsageError(f"{directory} keeps a compressed cache (MLA), which is not planned for")
    parameters = weight_bytes = embeddings = experts = 0
    has_head = False
    for name, tensor in _tensors(directory):
        begin, end = tensor["data_offsets"]
        count = math.prod(tensor["shape"])
        parameters += count
        weight_bytes += end - begin
        has_head = has_head or name.endswith("lm_head.weight")
        if name.endswith("embed_tokens.weight"):
            embeddings += count
        if ".experts." in name:
            experts += count
    if not parameters:
        raise UsageError(f"{directory} has no weights in safetensors to be counted")
    used = _share_of_experts(config)
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    layers = _attention_layers(config)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return ModelSize(
        parameters=parameters,
        multiplied=round(parameters - experts * (1 - used) - (embeddings if has_head else 0)),
        weight_bytes=weight_bytes,
        cache_elements=2 * layers * kv_heads * head_dim,
        attention_flops=4 * layers * heads * head_dim,
    )


def _attention_layers(config: Mapping[str, Any]) -> int:
    kinds = config.get("layer_types")
    if kinds:
        return sum(kind != "linear_attention" for kind in kinds)
    return int(config["num_hidden_layers"])


def _share_of_experts(config: Mapping[str, Any]) -> float:
    """Return the share of a layer's experts that a token is sent to."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if total := config.get(name):
            return int(config["num_experts_per_tok"]) / int(total)
    return 1.0


def _tensors(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and headers of all tensors; no weight is read."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= _LONGEST_HEADER:
                raise UsageError(f"{file} is no safetensors file")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        yield from header.items()
