"""The learning rate that ``auto`` stands for, and a warning for one that is far from it.

1e-6 is the usual rate of GRPO on all weights of a language model, and 1e-5 that of SFT. Adapters
need ten times the rate of all weights, for supervised and for policy-gradient training, whatever
their rank (Schulman et al. 2025, "LoRA Without Regret", Thinking Machines Lab). That was found with
an alpha of 32. Adam's update has the same size whatever the gradient's, so the change of a weight
grows with ``alpha``; the rate is divided by it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from bridle.trainer.config import GrpoConfig, LoraConfig, SftConfig

Settings = TypeVar("Settings", GrpoConfig, SftConfig)

_ALL_WEIGHTS: Final = {GrpoConfig: 1e-6, SftConfig: 1e-5}
_ADAPTERS: Final = 10.0
"""The factor between the rates of adapters and of all weights, at :data:`_ALPHA`."""
_ALPHA: Final = 32.0
_TOO_LOW: Final = 0.1
"""The share of the advised rate from which on a rate is far too low: it moves nothing."""
_TOO_HIGH: Final = 100.0
_SMALL: Final = 512
"""The hidden size below which a policy is for trials: such policies take any rate."""


def advised_rate(config: GrpoConfig | SftConfig) -> float:
    """Return the peak learning rate that ``auto`` stands for."""
    rate = _ALL_WEIGHTS[type(config)]
    lora: LoraConfig = config.lora
    return rate * _ADAPTERS * _ALPHA / lora.alpha if lora.rank else rate


def peak_rate(config: GrpoConfig | SftConfig) -> float:
    stated = config.optimizer.learning_rate
    return advised_rate(config) if isinstance(stated, str) else stated


def resolved(config: Settings) -> Settings:
    """Return ``config`` with a number as its learning rate."""
    return replace(config, optimizer=replace(config.optimizer, learning_rate=peak_rate(config)))


def rate_line(config: GrpoConfig | SftConfig) -> str:
    trained = f"adapters of rank {config.lora.rank}" if config.lora.rank else "all weights"
    chosen = "auto, " if config.optimizer.learning_rate == "auto" else ""
    return f"learning rate {peak_rate(config):.3g} ({chosen}{trained})"


def rate_warning(config: GrpoConfig | SftConfig, policy: Path) -> str | None:
    """Return how the learning rate is far from the advised one, or ``None`` if it is not.

    ``policy`` is the model's directory. A rate of 0 is meant, and a policy for trials takes any.
    """
    rate, advised = peak_rate(config), advised_rate(config)
    if not rate or _TOO_LOW < rate / advised < _TOO_HIGH or _hidden_size(policy) < _SMALL:
        return None
    low = rate < advised
    trained = f"adapters of alpha {config.lora.alpha:g}" if config.lora.rank else "all weights"
    so = "will hardly move the policy" if low else "may destroy the policy"
    return (
        f"the learning rate {rate:.3g} is {'below' if low else 'above'} the usual {advised:.3g} of "
        f"{trained} by a factor of {advised / rate if low else rate / advised:.0f}, and {so}"
    )


def _hidden_size(policy: Path) -> int:
    config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    return int(text.get("hidden_size") or _SMALL)
