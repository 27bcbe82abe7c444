"""Every setting of the trainer, as frozen values with their meaning beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from bridle.reconstruct.rewards import Over
from bridle.store.records import RewardSource

Weighting = Literal["session", "token", "constant"]
Layout = Literal["tree", "flat", "padded"]
OutcomePolicy = Literal["train", "drop", "exclude"]
Schedule = Literal["constant", "cosine"]
Through = Literal["directory", "transfer"]
TransferBackend = Literal["gloo", "nccl"]
Precision = Literal["auto", "float32", "bfloat16"]
TrainedKind = Literal["main", "subagent", "compaction", "side", "retry", "unknown"]
PartName = Annotated[str, Meta(min_length=1)]
"""A registered name, or ``FILE.py:NAME`` (:mod:`bridle.trainer.registry`)."""
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """Where a policy is trained, and in how many bits."""

    device: str = "auto"
    """``auto``: this machine's accelerator, else its CPU; or PyTorch's name of a device, such as
    ``cuda:1``; or several, ``cuda:0,cuda:2`` or ``cuda:0-3``, over which the policy is spread."""
    precision: Precision = "auto"
    """What forward passes compute in; what is trained, its gradients and the optimizer's state are
    float32 in any case. ``auto``: bfloat16 on an accelerator, as vLLM serves there, and float32 on
    a CPU."""
    recompute: bool = False
    """Compute a layer's activations again for its gradients instead of keeping them: one more
    forward pass, for a fraction of the memory (gradient checkpointing, Chen et al. 2016,
    arXiv 1604.06174)."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of low rank, trained instead of the weights (:mod:`bridle.trainer.policy.lora`)."""

    rank: Natural = 0
    """0: none, all weights are trained."""
    alpha: AboveZero = 32
    """Adapters count ``alpha / rank`` times."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """An optimizer and its learning rate over time."""

    name: PartName = "adamw"
    """``adamw`` (Loshchilov & Hutter 2019, arXiv 1711.05101), or a class or function as
    ``MODULE:NAME`` or ``FILE.py:NAME`` that makes an optimizer from parameters and the keywords
    ``lr``, ``betas``, ``eps`` and ``weight_decay``
    (:func:`bridle.trainer.learner.optimizer.make_optimizer`)."""
    learning_rate: AtLeastZero = 1e-3
    """Peak learning rate. With 0 AdamW leaves the weights exactly as they are."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: AboveZero = 1e-8
    weight_decay: AtLeastZero = 0.0
    grad_clip: AboveZero = 1.0
    """Largest global gradient norm; longer gradients are scaled down to it."""
    warmup_steps: Natural = 0
    """Optimizer steps (SFT) or loop steps (GRPO) of linear rise from 0 to the peak."""
    schedule: Schedule = "constant"
    final_fraction: Share = 0.1
    """Where ``cosine`` ends, as a fraction of the peak."""


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """How samples become the tokens of a forward pass."""

    layout: Layout = "tree"
    """``tree``: every prefix once, over all samples of a pack. ``flat``: samples one after another
    without sharing. ``padded``: one row per sample, padded on the right; also taken, with a
    warning, for models that the others do not compute exactly (windows, and recurrent layers other
    than Gated DeltaNet)."""
    max_tokens: Count = 8_192
    """Most tokens computed in one forward pass: trees are cut between branches. A branch larger
    than that gets its own, in which a tree also takes branches that share more with it than they
    add, up to twice the tokens."""
    block_tokens: Count = 256
    """Most tokens of a run whose attention is one call. Small ones waste less, large ones call less
    often."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """What a session's reward is compared with."""

    baseline: PartName = "grpo"
    """``grpo``, ``leave_one_out``, ``mean``, ``gated``, ``per_role``, ``gigpo``, ``turn_returns``,
    ``spiral``, ``none`` (:mod:`bridle.trainer.credit`), or one registered with
    ``register_advantage``."""
    deviation: Literal["sample", "population"] = "sample"
    """Which standard deviation advantages are divided by, where they are."""
    discount: Share = 1.0
    """γ of a step's return, per step. GiGPO's paper has 0.95."""
    step_weight: AtLeastZero = 1.0
    """ω of GiGPO: how much a step's own advantage counts."""
    running_decay: BelowOne = 0.95
    """α of ``spiral``: how much of a role's baseline stays with each session."""
    gate: float = 1.0
    """Of ``gated``: rewards of steps count in sessions whose own reward is at least this."""
    role_rewards: Mapping[str, str] | None = None
    """Of ``per_role`` and ``spiral``, by role: the name of the session's reward that is this role's
    own. ``None``, and for roles that are not named: the reward that is named as the role is. A role
    without a reward of its own has its session's number."""
    overlong_tokens: Natural = 0
    """Sampled tokens from which on a session's reward is less by 1; 0: no session is punished for
    its length (:mod:`bridle.trainer.filters.overlong`)."""
    overlong_margin: Count = 1024
    """Tokens before ``overlong_tokens`` over which the punishment grows."""
    reward_weights: Mapping[str, float] | None = None
    """Names of rewards and their factors. ``None``: the session's reward named ``reward`` alone
    where it has one, else the sum of all (:mod:`bridle.reconstruct.rewards`)."""
    reward_turns: Over | None = None
    """How rewards of single calls become a part of the session's number, for names that the session
    as a whole was not given. ``None``: they are no part of it; ``gigpo`` and ``turn_returns`` then
    take the return of the whole episode, as their papers do
    (:mod:`bridle.trainer.credit.steps`)."""
    reward_sources: Annotated[tuple[RewardSource, ...], Meta(min_length=1)] = (
        RewardSource.VERIFIER,
    )
    """Whose rewards count: ``verifier``, ``operator`` (admin key, ``bridle reward``),
    ``unattested`` (of a release in which an agent could write them)."""


@dataclass(frozen=True, slots=True)
class DistillationConfig:
    """A teacher that scores the policy's own samples (:mod:`bridle.trainer.credit.distillation`).

    Groups whose rewards are all equal are trained too, since the teacher has something to say of
    them.
    """

    url: str = ""
    """Base URL, without ``/v1``, of the engine that serves the teacher; empty: none."""
    model: str = ""
    """The teacher's served name; empty: the first one."""
    key_variable: str = ""
    """Name of the environment variable that has the engine's key, or whose ``_FILE`` names a file
    with it; empty: it asks for none."""
    coefficient: AboveZero = 1.0
    """Advantage for each nat by which the teacher finds a token likelier than the policy did."""
    clip: AtLeastZero = 5.0
    """Largest difference of a token, in nats, up or down; 0: no bound."""
    parallel: Count = 8
    """Samples that the teacher is asked about at a time."""


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """Which sessions are not trained on."""

    drop_zero_variance: bool = True
    """Groups in which all rewards are equal teach nothing; leave them out of the batch."""
    outcomes: Mapping[str, OutcomePolicy] = field(
        default_factory=lambda: {
            "infrastructure": "exclude",
            "cancelled": "exclude",
            "quarantined": "exclude",
            "timeout": "drop",
        }
    )
    """By session outcome. ``train``: as any other. ``drop``: counts in the group's baseline, is not
    trained on. ``exclude``: neither; its reward says nothing about the policy. Outcomes not named
    here are trained on."""
    refill: Annotated[float, Meta(ge=1)] = 1.0
    """Above 1, groups of which nothing is trained are replaced until the step has its groups, or
    has collected so many times as many: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""
    resample_on_correct: bool = False
    """Keep half of each group, successes with few faulty tool calls first: GRPO-RoC
    (:mod:`bridle.trainer.filters.resample_on_correct`)."""
    extra: tuple[PartName, ...] = ()
    """Further filters (:mod:`bridle.trainer.filters`): ``void_turn``, ``over_turn``, ``truncated``,
    ``failed_calls``, or those registered with ``register_filter``. Each drops sessions, with its
    name as the reason."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Successes of earlier steps that are trained again (:mod:`bridle.trainer.collection.replay`).

    The paper (SPEAR, arXiv 2509.22601) has a buffer of 2048 sessions.
    """

    share: Share = 0.0
    """Replayed sessions of a step, as a fraction of those that it collects, rounded; 0: none."""
    buffer: Count = 512
    """Latest successes that are kept."""
    baselines: Count = 512
    """Latest groups over whose mean rewards the median is taken that a replayed session has to
    exceed."""
    warmup_steps: Natural = 200
    """Steps over which the advantages of replayed sessions grow from nothing, by half a cosine."""
    max_staleness: Natural = 10
    """Most policy versions that a replayed session may lag behind."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The policy-gradient loss. Formulas stand in :mod:`bridle.trainer.losses.losses`."""

    name: PartName = "clip"
    """``clip``, ``gspo``, ``cispo``, or one registered with ``register_loss``."""
    clip_low: Share = 0.2
    """ε below 1: ratios to the policy at the start of the step under ``1 - clip_low`` give no
    gradient for bad tokens, where a step has several updates. 3e-4 for GSPO. ``cispo`` has no lower
    bound."""
    clip_high: AtLeastZero = 0.28
    """ε above 1, larger than ``clip_low`` in DAPO (clip-higher). 4e-4 for GSPO."""
    weighting: Weighting = "session"
    """How tokens are weighed against each other; see :mod:`bridle.trainer.credit.weighting`."""
    constant_tokens: Count = 1024
    """Normaliser L of ``weighting="constant"`` (Dr. GRPO): tokens per session."""
    importance: PartName = "truncate"
    """How tokens are weighed by what the engine says that it drew them from: ``truncate``,
    ``mask``, ``sequence`` or ``none`` (:mod:`bridle.trainer.losses.importance`), or a function as
    ``FILE.py:NAME``."""
    importance_cap: AboveZero = 2.0
    """C, the largest importance weight."""
    importance_floor: AtLeastZero = 0.5
    """Of ``mask``: a token whose ratio is below it is not trained."""
    trust_region: PartName = "clip"
    """Which tokens are too far from what they were sampled from to be trained further: ``clip``,
    ``off_policy`` or ``none`` (:mod:`bridle.trainer.losses.trust`), or a function as
    ``FILE.py:NAME``."""
    trust_low: Share = 0.2
    """Of ``clip``: how far below 1 a bad token's ``π / μ`` may fall."""
    trust_high: AtLeastZero = 0.28
    """Of ``clip``: how far above 1 a good token's ``π / μ`` may rise."""
    trust_nats: AboveZero = 0.1
    """Of ``off_policy``: nats a token, on average over the branch, by which it may have become
    rarer."""
    kl_coefficient: AtLeastZero = 0.0
    """β of the KL penalty to the reference policy, that of version 0. When not 0 the reference is
    held in memory as a second model; with adapters it is the same model with these off."""
    kl_corrected: bool = False
    """Weigh the KL estimate by ``π / μ`` of its token (DeepSeek-V3.2, arXiv 2512.02556, equation
    7): its expectation is then that of π, and so is its gradient."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    every: Count = 1
    """Steps between checkpoints."""
    keep: Count = 2
    """Newest checkpoints that are kept."""


@dataclass(frozen=True, slots=True)
class PublishConfig:
    through: Through = "directory"
    """``directory``: written first, and read by the engine. ``transfer``: sent from memory to a
    vLLM, and written afterwards."""
    transfer_address: str = "127.0.0.1"
    """Where the trainer listens while it sends: loopback, or its address in a private network."""
    transfer_backend: TransferBackend = "gloo"
    """``gloo``: through the hosts' memory. ``nccl``: between different GPUs."""
    tolerance: AtLeastZero | None = None
    """Largest mean |engine logprob − trainer logprob| over the probes, nats. ``None``: 1e-3, or 0.1
    where the trainer computes in bfloat16."""
    keep: Count = 2
    """Newest published weights that stay on disk; at least the one being served."""
    pause_mode: Literal["keep", "wait", "abort"] = "wait"
    """What happens to replies in flight: frozen and continued, finished first, or cut."""


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """Which of a session's calls are trained."""

    kinds: tuple[TrainedKind, ...] = ("main", "subagent", "retry", "unknown")
    """What calls are for. With ``compaction`` the summaries that a conversation goes on from are
    trained, too, by the reward of their session (SUPO, arXiv 2510.06727)."""


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """One GRPO run."""

    steps: Count = 100
    seconds: AtLeastZero | None = None
    """The run ends when it has taken so long, if its steps do not end first. Its learning rate then
    follows the time: it is at its end when the run is. ``None``: no limit."""
    minibatches: Count = 1
    """Optimizer updates per pass over a step's sessions; whole groups are dealt out to them."""
    epochs: Count = 1
    """Passes over a step's sessions."""
    max_staleness: Natural = 0
    """Most policy versions a trained token may lag behind. 0: collect, train, publish, in turn.
    n: the groups of up to n steps run ahead of training (:mod:`bridle.trainer.collection`); tokens
    that lag more are masked and counted. Replayed sessions have a limit of their own."""
    seed: Natural = 0
    """Decides which groups share a minibatch, and which successes are replayed."""
    sinks: tuple[PartName, ...] = ("tensorboard",)
    """Trackers that take the run's numbers besides the store: ``tensorboard``, ``wandb``,
    ``mlflow``, ``trackio`` (:mod:`bridle.trainer.sinks`)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    compute: ComputeConfig = ComputeConfig()
    packing: PackingConfig = PackingConfig()
    samples: SampleConfig = SampleConfig()
    advantages: AdvantageConfig = AdvantageConfig()
    distillation: DistillationConfig = DistillationConfig()
    filters: FilterConfig = field(default_factory=FilterConfig)
    replay: ReplayConfig = ReplayConfig()
    loss: LossConfig = LossConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    publish: PublishConfig = PublishConfig()


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Supervised fine-tuning on masked tokens."""

    epochs: Count = 1
    batch_size: Count = 32
    """Examples per optimizer update."""
    seed: Natural = 0
    """Decides the order of examples."""
    optimizer: OptimizerConfig = OptimizerConfig(schedule="cosine", warmup_steps=10)
    lora: LoraConfig = LoraConfig()
    compute: ComputeConfig = ComputeConfig()
    packing: PackingConfig = PackingConfig()
