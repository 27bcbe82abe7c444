"""Every setting of the trainer, as frozen values with their meaning beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reconstruct.rewards import Over

Baseline = Literal["grpo", "leave_one_out", "mean"]
LossName = Literal["clip", "gspo", "cispo"]
Weighting = Literal["session", "token", "constant"]
Layout = Literal["tree", "flat", "padded"]
OutcomePolicy = Literal["train", "drop", "exclude"]
Schedule = Literal["constant", "cosine"]
Through = Literal["directory", "transfer"]
TransferBackend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) and its learning rate over time."""

    learning_rate: float = 1e-3
    """Peak learning rate. 0 leaves the weights exactly as they are."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest global gradient norm; longer gradients are scaled down to it."""
    warmup_steps: int = 0
    """Optimizer steps (SFT) or loop steps (GRPO) of linear rise from 0 to the peak."""
    schedule: Schedule = "constant"
    final_fraction: float = 0.1
    """Where ``cosine`` ends, as a fraction of the peak."""


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """How samples become the tokens of a forward pass."""

    layout: Layout = "tree"
    """``tree``: every prefix once, over all samples of a pack. ``flat``: samples one after another
    without sharing. ``padded``: one row per sample, padded on the right; also taken, with a
    warning, for models that the others do not compute exactly (recurrent layers, windows)."""
    max_tokens: int = 8_192
    """Most tokens computed in one forward pass. A session larger than that gets its own, in which
    a tree also takes others that share its prefix, up to twice the tokens."""
    block_tokens: int = 256
    """Queries per attention call. Small blocks waste less, large ones call less often."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """What a session's reward is compared with."""

    baseline: Baseline = "grpo"
    per_role: bool = False
    """Compare each role (sub-agent) only with sessions in which that role acted."""
    reward_weights: Mapping[str, float] | None = None
    """Names of session rewards and their factors; ``None``: the sum of all of them."""
    reward_turns: Over | None = None
    """How rewards of single calls and turns add up to one of the session, for names that the
    session as a whole was not given; ``None``: they do not count."""


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """Which sessions are not trained on."""

    drop_zero_variance: bool = True
    """Groups in which all rewards are equal teach nothing; leave them out of the batch."""
    outcomes: Mapping[str, OutcomePolicy] = field(
        default_factory=lambda: {
            "infrastructure": "exclude",
            "cancelled": "exclude",
            "timeout": "drop",
        }
    )
    """By session outcome. ``train``: as any other. ``drop``: counts in the group's baseline, is not
    trained on. ``exclude``: neither; its reward says nothing about the policy. Outcomes not named
    here are trained on."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The policy-gradient loss. Formulas stand in :mod:`trainer.losses`."""

    name: LossName = "clip"
    clip_low: float = 0.2
    """ε below 1: ratios under ``1 - clip_low`` give no gradient for bad tokens. 3e-4 for GSPO."""
    clip_high: float = 0.28
    """ε above 1, larger than ``clip_low`` in DAPO (clip-higher). 4e-4 for GSPO."""
    weighting: Weighting = "session"
    """How tokens are weighed against each other; see :mod:`trainer.weighting`."""
    constant_tokens: int = 1024
    """Normaliser L of ``weighting="constant"`` (Dr. GRPO): tokens per session."""
    importance_cap: float | None = 2.0
    """Cap C of truncated importance sampling against the engine's logprobs; ``None``: off."""
    kl_coefficient: float = 0.0
    """β of the KL penalty to the reference policy; needs a reference model when not 0."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    every: int = 1
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints that are kept."""


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """One GRPO run."""

    steps: int = 100
    seconds: float | None = None
    """The run ends when it has taken so long, if its steps do not end first. Its learning rate then
    follows the time: it is at its end when the run is. ``None``: no limit."""
    minibatches: int = 1
    """Optimizer updates per pass over a step's sessions; whole groups are dealt out to them."""
    epochs: int = 1
    """Passes over a step's sessions."""
    max_staleness: int = 0
    """Most policy versions a trained token may lag behind. 0: collect, train, publish, in turn.
    n: up to n collections run ahead of training; what lags more is dropped and counted."""
    seed: int = 0
    """Decides which groups share a minibatch."""
    optimizer: OptimizerConfig = OptimizerConfig()
    packing: PackingConfig = PackingConfig()
    advantages: AdvantageConfig = AdvantageConfig()
    filters: FilterConfig = field(default_factory=FilterConfig)
    loss: LossConfig = LossConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Supervised fine-tuning on masked tokens."""

    epochs: int = 1
    batch_size: int = 32
    """Examples per optimizer update."""
    seed: int = 0
    """Decides the order of examples."""
    optimizer: OptimizerConfig = OptimizerConfig(schedule="cosine", warmup_steps=10)
    packing: PackingConfig = PackingConfig()


@dataclass(frozen=True, slots=True)
class PublishConfig:
    through: Through = "directory"
    """``directory``: written first, and read by the engine. ``transfer``: sent from memory to a
    vLLM, and written afterwards."""
    transfer_address: str = "127.0.0.1"
    """Where the trainer listens while it sends: loopback, or its address in a private network."""
    transfer_backend: TransferBackend = "gloo"
    """``gloo``: through the hosts' memory. ``nccl``: between different GPUs."""
    tolerance: float = 1e-3
    """Largest mean |engine logprob − trainer logprob| over the probes; suits float32."""
    keep: int = 2
    """Newest published weights that stay on disk; at least the one being served."""
    pause_mode: Literal["keep", "wait", "abort"] = "wait"
    """What happens to replies in flight: frozen and continued, finished first, or cut."""
