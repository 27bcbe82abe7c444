"""A trial of the parts of a loss on made-up tokens, before a run collects its first session."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from bridle.registry import Registry, Unjudged
from bridle.trainer.config import LossConfig
from bridle.trainer.losses.importance import CORRECTIONS
from bridle.trainer.losses.losses import LOSSES, Surrogate
from bridle.trainer.losses.terms import TokenTerms
from bridle.trainer.losses.trust import TRUST_REGIONS

_TOKENS: Final = 4


def require_loss(config: LossConfig) -> None:
    """Raise :class:`bridle.registry.PartFailed` for a part of ``config`` that fails its trial.

    The parts are the loss, the importance correction and the trust region, on the tokens of two
    branches. The error is also raised if a part does not return what ``docs/extend.md`` states, or
    values that are not finite.
    """
    with suppress(Unjudged):
        _try_loss(config)
    for registry, name in ((CORRECTIONS, config.importance), (TRUST_REGIONS, config.trust_region)):
        with suppress(Unjudged):
            values = registry.tried(name, config.options, _made_up(), config)
            _require_one_each(registry, name, values, "what it returns")


def _try_loss(config: LossConfig) -> None:
    loss = LOSSES.tried(config.name, config.options, _made_up(), config)
    if not isinstance(loss, Surrogate):
        raise LOSSES.failed(config.name, f"returns a {type(loss).__name__}, not a Surrogate")
    numbers = {"loss": loss.loss, "ratio": loss.ratio, "clipped": loss.clipped, **loss.metrics}
    for name, values in numbers.items():
        _require_one_each(LOSSES, config.name, values, f"its {name}")
    if not loss.loss.requires_grad:
        raise LOSSES.failed(config.name, "returns a loss without a gradient")


def _require_one_each(registry: Registry[Any], name: str, values: object, what: str) -> None:
    if not isinstance(values, Tensor) or values.shape != (_TOKENS,):
        shape = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise registry.failed(name, f"gives {what} as {shape}, not as a tensor [M] for M tokens")
    if not bool(torch.isfinite(values).all()):
        raise registry.failed(name, f"gives {what} with values that are not finite")


def _made_up() -> TokenTerms:
    logprobs = torch.tensor([-0.5, -1.0, -1.5, -2.0], requires_grad=True)
    drawn = logprobs.detach() - 0.1
    return TokenTerms(
        logprobs,
        old_logprobs=drawn,
        behaviour_logprobs=drawn.clone(),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        weights=torch.full((_TOKENS,), 1 / _TOKENS),
        branches=torch.tensor([0, 0, 1, 1]),
        reference_logprobs=drawn.clone(),
        entropies=torch.full((_TOKENS,), 0.7, requires_grad=True),
    )
