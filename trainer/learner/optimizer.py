"""AdamW as configured, and its learning rate as a function of the step alone."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from bridle.trainer.config import OptimizerConfig
from bridle.trainer.policy.sharding import number


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over the parameters of ``model`` that require gradients."""
    return AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of step ``step`` (from 0) of ``total_steps``: linear warm-up, then the schedule.

    ``cosine`` falls to ``final_fraction`` of the peak at the last step. A function of the step, so
    that resuming needs no scheduler state.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
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
