"""The optimizer as configured, and its learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bridle.errors import UsageError
from bridle.registry import Registry
from bridle.trainer.config import OptimizerConfig
from bridle.trainer.policy.sharding import number, share_of
from bridle.user_code import describe

OptimizerFactory = Callable[..., Optimizer]

OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer", "bridle.optimizers")
OPTIMIZERS.register("adamw", AdamW)
_SPREADABLE: Final = ("adamw",)


class UnsupportedOptimizer(UsageError, ValueError):
    """The named factory makes no optimizer from the settings, or one that cannot be spread."""


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Make the optimizer that ``config`` names.

    It is over the parameters of ``model`` that require gradients. Its factory is called with a list
    of them and the keywords ``lr``, ``betas``, ``eps`` and ``weight_decay``. Raises
    :class:`UnsupportedOptimizer`, and the errors of :meth:`Registry.get`.
    """
    if share_of(model).processes > 1:
        require_spreadable(config)
    factory = OPTIMIZERS.get(config.name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer = factory(
            trained,
            lr=config.peak,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
    except Exception as error:
        why = describe(error, config.name.rpartition(":")[0])
        raise UnsupportedOptimizer(
            f"optimizer {config.name} was not made: {why}. It is called with parameters and the "
            "keywords lr, betas, eps and weight_decay; name a function of your own, as "
            "FILE.py:NAME, that takes these and passes on what the optimizer takes"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedOptimizer(
            f"optimizer {config.name} is a {type(optimizer).__name__}: name a class or function "
            "that returns a torch.optim.Optimizer"
        )
    return optimizer


def require_spreadable(config: OptimizerConfig) -> None:
    """Raise :class:`UnsupportedOptimizer` unless several processes can train with the optimizer.

    Checkpoints gather an optimizer's state from all processes, which is known to work only for some
    built-in ones.
    """
    if config.name not in _SPREADABLE:
        raise UnsupportedOptimizer(
            f"optimizer {config.name} trains in one process: name one of {', '.join(_SPREADABLE)} "
            "to train on several devices"
        )


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the rate of step ``step`` (from 0) of ``total_steps``.

    A linear warm-up comes first, then the schedule. ``cosine`` falls to ``final_fraction`` of the
    peak at the last step. The rate is a function of the step alone, so resuming needs no scheduler
    state.
    """
    warmup = warmup_steps(total_steps, config)
    if step < warmup:
        return config.peak * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.peak
    span = max(1, total_steps - 1 - warmup)
    progress = min(1.0, (step - warmup) / span)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.peak * (config.final_fraction + (1 - config.final_fraction) * cosine)


def warmup_steps(total_steps: int, config: OptimizerConfig) -> int:
    """Return the length of the warm-up: as configured, but a quarter of all steps at most."""
    return min(config.warmup_steps, total_steps // 4)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # one that a compiled step has captured
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_and_step(model: nn.Module, optimizer: Optimizer, grad_clip: float) -> tuple[float, bool]:
    """Clip the accumulated gradients, step and clear them.

    Returns the gradient norm before clipping, and whether the step was taken: with a norm that is
    not finite the weights stay as they are.
    """
    norm = number(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip))
    finite = math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, finite
