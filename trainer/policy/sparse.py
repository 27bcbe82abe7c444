"""Models whose attention leaves tokens out by an index, from some length on.

An indexer chooses the ``index_topk`` tokens that each query attends to (DeepSeek-V3.2, arXiv
2512.02556, section 2.1; GLM-5). Up to that length all are chosen, which is the dense attention that
packs are computed with. Beyond it the trainer's logprobs would differ from the engine's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from bridle.errors import BridleError


class SequenceTooLong(BridleError, ValueError):
    """A sequence is longer than the model attends to as a whole."""


def index_limit(model: nn.Module) -> int | None:
    """Return the most tokens of a sequence that the model attends to as a whole.

    ``None`` stands for any number. The limit is read from attributes of its configuration that new
    families have under the same names: ``index_topk`` in tokens, and ``index_topk_blocks`` or
    ``sparse_topk_blocks`` in blocks.
    """
    model_config: Any = getattr(model, "config", None)
    if model_config is None:
        return None
    config = model_config.get_text_config()
    limits = [getattr(config, "index_topk", None)]
    for kind in ("index", "sparse"):
        blocks = getattr(config, f"{kind}_topk_blocks", None)
        if blocks is not None:
            limits.append(blocks * (getattr(config, f"{kind}_block_size", None) or 1))
    return min((limit for limit in limits if limit is not None), default=None)


def require_within_index(model: nn.Module, tokens: int) -> None:
    """Raise :class:`SequenceTooLong` if the model's index leaves out some of so many tokens.

    The tokens are those of one sequence.
    """
    limit = index_limit(model)
    if limit is not None and tokens > limit:
        name = type(model).__name__.removeprefix("FSDP")
        raise SequenceTooLong(
            f"{name} attends to {limit} tokens that its index chooses, and a sequence to be scored "
            f"has {tokens}; the trainer computes dense attention. Serve it with a context of at "
            f"most {limit} tokens (vLLM's --max-model-len), or leave longer sessions out"
        )
