"""A policy's logits: its output layer, and the changes that some families make to its output.

Gemma 2 and its successors cap logits softly, Granite divides them, Cohere multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

TOLERANCE: Final = 1e-4
"""Maximum difference between logits computed here and the model's own, relative to the largest."""
_PROBED: Final = 8
"""Number of tokens of the comparison."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output head, from hidden states to logits.

    It is kept apart from the body so that logits are computed for needed tokens only.
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Head:
        """Return the head of a causal LM of Transformers."""
        transformers: Any = model
        config = transformers.config.get_text_config()
        scale = (getattr(config, "logit_scale", None) or 1.0) / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(transformers.get_output_embeddings(), scale, softcap)

    @property
    def vocabulary(self) -> int:
        weight = self.layer.weight
        assert isinstance(weight, Tensor)  # noqa: S101 - every output embedding is a linear layer
        return weight.shape[0]

    @property
    def is_plain(self) -> bool:
        return self.scale == 1.0 and self.softcap is None

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits ``float[..., V]`` of hidden states ``float[..., hidden]``."""
        logits: Tensor = self.layer(states)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@torch.no_grad()
def why_not_its_own(model: nn.Module) -> str | None:
    """Return how logits of :class:`Head` differ from the model's own, or ``None``.

    ``None`` means that they agree or that the model has no settings for logits.
    """
    head = Head.of(model)
    if head.is_plain:
        return None
    transformers: Any = model
    ids = torch.arange(_PROBED)[None] % head.vocabulary
    own = transformers(input_ids=ids, use_cache=False).logits.float()
    states = transformers.base_model(input_ids=ids, use_cache=False).last_hidden_state
    gap = float((head(states).float() - own).abs().max() / own.abs().max())
    if gap <= TOLERANCE:
        return None
    return f"its settings for logits are another family's: they differ by {gap:.2g} of the largest"
