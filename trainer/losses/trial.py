"""A trial of the parts of a loss on made-up tokens, before a run collects its first session."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from bridle.errors import UsageError
from bridle.registry import Registry
from bridle.trainer.config import LossConfig
from bridle.trainer.losses.importance import CORRECTIONS
from bridle.trainer.losses.losses import LOSSES, Surrogate
from bridle.trainer.losses.terms import TokenTerms
from bridle.trainer.losses.trust import TRUST_REGIONS
from bridle.user_code import describe

_TOKENS: Final = 4


def require_loss(config: LossConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` for a part of ``config`` that fails on two branches.

    The parts are the loss, the importance correction and the trust region. The error is also raised
    if a part does not return what ``docs/extend.md`` states.
    """
    loss = _tried(LOSSES, config.name, config)
    if not isinstance(loss, Surrogate):
        _refuse(LOSSES, config.name, f"returns a {type(loss).__name__}, not a Surrogate")
    numbers = {"loss": loss.loss, "ratio": loss.ratio, "clipped": loss.clipped, **loss.metrics}
    for name, values in numbers.items():
        _require_one_each(LOSSES, config.name, values, f"its {name}")
    if not loss.loss.requires_grad:
        _refuse(LOSSES, config.name, "returns a loss without a gradient")
    for registry, name in ((CORRECTIONS, config.importance), (TRUST_REGIONS, config.trust_region)):
        _require_one_each(registry, name, _tried(registry, name, config), "what it returns")


def _tried(registry: Registry[Any], name: str, config: LossConfig) -> Any:
    part: Callable[..., Any] = registry.configured(name, config.options)
    try:
        return part(_made_up(), config)
    except Exception as error:
        place = inspect.getsourcefile(inspect.unwrap(part)) if inspect.isfunction(part) else None
        reason = f"raises {describe(error, place)}"
        raise UsageError(f"the {registry.kind} {name!r} {reason}") from error


def _require_one_each(registry: Registry[Any], name: str, values: object, what: str) -> None:
    if not isinstance(values, Tensor) or values.shape != (_TOKENS,):
        shape = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
        _refuse(registry, name, f"gives {what} as {shape}, not as a tensor [M] for M tokens")


def _refuse(registry: Registry[Any], name: str, reason: str) -> NoReturn:
    raise UsageError(f"the {registry.kind} {name!r} {reason}")


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
