"""The optimizer as configured, and its learning rate as a function of the step alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer, RAdam

from bridle.errors import UsageError
from bridle.registry import Registry
from bridle.trainer.config import OptimizerConfig
from bridle.trainer.learner.gradients import clipped_norms
from bridle.trainer.learner.several import Several
from bridle.trainer.policy.sharding import share_of
from bridle.user_code import describe

OptimizerFactory = Callable[..., Optimizer]

OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer", "bridle.optimizers")
OPTIMIZERS.register("adamw", AdamW)
_SPREADABLE: Final = (AdamW, Adam, NAdam, RAdam, SGD, Muon)
"""Optimizers whose state has one tensor of a parameter's shape or a number for each entry, which is
what checkpoints can gather from several processes."""
_NAMED: Final = "named_parameters"
"""The name of a factory's first argument by which it asks for parameters with their names."""
_FACTOR: Final = "rate_factor"
"""The key of a group whose learning rate is not the configured one: the quotient of both."""


class UnsupportedOptimizer(UsageError, ValueError):
    """The named factory makes no optimizer from the settings, or one that cannot be spread."""


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Make the optimizer that ``config`` names.

    It is over the parameters of ``model`` that require gradients. Its factory is called with a list
    of them and the keywords ``lr``, ``betas``, ``eps`` and ``weight_decay``. If its first argument
    is called ``named_parameters``, the list has pairs of a name and a parameter. A group that it
    makes with another learning rate keeps the quotient of both over the schedule. Raises
    :class:`UnsupportedOptimizer`, and the errors of :meth:`Registry.get`.
    """
    factory = OPTIMIZERS.get(config.name)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    try:
        optimizer = factory(
            named if _asks_for_names(factory) else [each for _, each in named],
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
    if share_of(model).processes > 1:
        _require_spreadable(optimizer, config.name)
    for group in optimizer.param_groups:
        if config.peak and float(group["lr"]) != config.peak:
            group[_FACTOR] = float(group["lr"]) / config.peak
    return optimizer


def _asks_for_names(factory: OptimizerFactory) -> bool:
    try:
        return next(iter(inspect.signature(factory).parameters), None) == _NAMED
    except ValueError:  # a builtin, which has no signature
        return False


def _parts(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer.parts if isinstance(optimizer, Several) else (optimizer,)


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's class, or of the classes that it joins."""
    return "+".join(type(part).__name__ for part in _parts(optimizer))


def _require_spreadable(optimizer: Optimizer, name: str) -> None:
    """Raise :class:`UnsupportedOptimizer` unless several processes can train with the optimizer."""
    for part in _parts(optimizer):
        if not isinstance(part, _SPREADABLE):
            known = ", ".join(each.__name__ for each in _SPREADABLE)
            raise UnsupportedOptimizer(
                f"optimizer {name} trains in one process, since it is a {type(part).__name__}: on "
                f"several devices there are {known}, and bridle.trainer.learner.several:Several"
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
        own = rate * group.get(_FACTOR, 1.0)
        if isinstance(group["lr"], Tensor):  # one that a compiled step has captured
            group["lr"].fill_(own)
        else:
            group["lr"] = own


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The outcome of an optimizer step."""

    norm: float
    """The global norm of the gradient before clipping."""
    by_kind: Mapping[str, float]
    """The norm by kinds of layers (:mod:`bridle.trainer.learner.gradients`)."""

    @property
    def taken(self) -> bool:
        """Return whether the weights have moved. With a norm that is not finite they have not."""
        return math.isfinite(self.norm)


def clip_and_step(model: nn.Module, optimizer: Optimizer, grad_clip: float) -> OptimizerStep:
    """Clip the accumulated gradients, step if their norm is finite, and clear them."""
    step = OptimizerStep(*clipped_norms(model, grad_clip))
    if step.taken:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return step
