"""Packing of weights that layers share, after a reload on CPU.

On CPU, vLLM packs each linear weight into oneDNN's layout when it is loaded. A reload repeats that
for each layer that a tensor in the checkpoint loads. An output layer tied to the embedding has no
such tensor, keeps its old packed copy, and would go on predicting with the previous version's
output matrix.
"""

from __future__ import annotations

from typing import Any


def repack_shared_weights(model: Any) -> None:
    """Pack again each weight that several layers share, in each of these layers."""
    sharing: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel() and hasattr(layer, "cpu_linear"):
            sharing.setdefault(id(weight), []).append(layer)
    for layers in sharing.values():
        if len(layers) > 1:
            for layer in layers:
                layer.quant_method.process_weights_after_loading(layer)
