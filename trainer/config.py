"""The trainer's settings, as frozen dataclasses whose fields are documented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from bridle.reconstruct.rewards import Over
from bridle.registry import Options
from bridle.store.reward import RewardSource

Weighting = Literal["session", "token", "constant"]
Layout = Literal["tree", "flat", "padded"]
OutcomePolicy = Literal["train", "drop", "exclude"]
Schedule = Literal["constant", "cosine"]
Through = Literal["directory", "transfer", "lora"]
TransferBackend = Literal["gloo", "nccl"]
TeacherKind = Literal["served", "ema"]
ContextPlace = Literal["system", "user"]
Precision = Literal["auto", "float32", "bfloat16"]
Auto = Literal["auto"]
TrainedKind = Literal["main", "subagent", "compaction", "side", "retry", "unknown"]
PartName = Annotated[str, Meta(min_length=1)]
"""A registered name, or ``FILE.py:NAME`` (:mod:`bridle.registry`)."""
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """The devices that train a policy, and the precision of its forward passes."""

    device: str = "auto"
    """Devices to train on. ``auto`` uses this machine's accelerator, or its CPU if there is none.
    Other values are PyTorch's name of a device, such as ``cuda:1``, or of several devices, such as
    ``cuda:0,cuda:2`` or ``cuda:0-3``, over which the policy is spread."""
    precision: Precision = "auto"
    """The type that forward passes compute in. Trained weights, their gradients and the optimizer's
    state are float32 in any case. ``auto`` is bfloat16 on an accelerator, as vLLM serves there, and
    float32 on a CPU."""
    recompute: bool = False
    """Recompute each layer's activations in the backward pass instead of keeping them (gradient
    checkpointing, Chen et al. 2016, arXiv 1604.06174). This costs one more forward pass and needs a
    fraction of the memory."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters, trained instead of the weights (:mod:`bridle.trainer.policy.lora`)."""

    rank: Natural = 0
    """The rank of the adapters. With 0 there are none, and all weights are trained."""
    alpha: AboveZero = 32
    """The scale of the adapters: their output is multiplied by ``alpha / rank``."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """An optimizer and its learning rate over time."""

    name: PartName = "adamw"
    """The optimizer: ``adamw`` (Loshchilov & Hutter 2019, arXiv 1711.05101), or a class or
    function, as ``MODULE:NAME`` or ``FILE.py:NAME``, that makes an optimizer from parameters, or
    named ones, and the keywords ``lr``, ``betas``, ``eps`` and ``weight_decay``
    (:func:`bridle.trainer.learner.optimizer.make_optimizer`)."""
    learning_rate: AtLeastZero | Auto = "auto"
    """Peak learning rate. ``auto`` depends on what is trained: 1e-6 for all weights of GRPO and
    1e-5 of SFT, and for adapters ten times as much at an alpha of 32
    (:mod:`bridle.trainer.learner.rates`). With 0 AdamW leaves the weights exactly as they are."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: AboveZero = 1e-8
    weight_decay: AtLeastZero = 0.0
    grad_clip: AboveZero = 1.0
    """Largest global gradient norm; longer gradients are scaled down to it."""
    warmup_steps: Natural = 5
    """Number of optimizer steps (SFT) or loop steps (GRPO) over which the learning rate rises
    linearly to the peak. It is a quarter of the run's steps at most, so that a run of three steps
    or fewer has no warm-up."""
    schedule: Schedule = "constant"
    final_fraction: Share = 0.1
    """Learning rate at the end of the ``cosine`` schedule, as a fraction of the peak."""

    @property
    def peak(self) -> float:
        """The peak learning rate. Raise ``ValueError`` if it is still ``auto``."""
        if isinstance(self.learning_rate, str):
            raise ValueError("the learning rate is auto: bridle.trainer.learner.rates.resolved")
        return self.learning_rate


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """The packing of samples into forward passes."""

    layout: Layout = "tree"
    """The layout of a pack. ``tree`` computes every prefix once for all samples of the pack.
    ``flat`` puts samples one after another without sharing. ``padded`` gives each sample a row,
    padded on the right; it is also used, with a warning, for models that the other layouts do not
    compute exactly (recurrent layers other than Gated DeltaNet)."""
    max_tokens: Count = 8_192
    """Maximum number of tokens in one forward pass; trees are cut between branches. A branch that
    is longer gets a pass of its own. With ``tree``, such a pass also takes branches that share more
    tokens with it than they add, until it is twice as long as the branch."""
    block_tokens: Count = 256
    """Maximum number of consecutive tokens whose attention is computed in one call. Small blocks
    waste less work, and large blocks need fewer calls."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """The estimation of advantages: a session's rewards, and the baseline for them."""

    baseline: PartName = "grpo"
    """The advantage estimator: ``grpo``, ``leave_one_out``, ``mean``, ``lite_ppo``, ``gated``,
    ``per_role``, ``gigpo``, ``turn_returns``, ``critic``, ``spiral``, ``aem``, ``igpo``, ``none``
    (:mod:`bridle.trainer.credit`), or one registered with ``register_advantage``."""
    deviation: Literal["sample", "population"] = "sample"
    """The standard deviation used by estimators that divide by one: that of the sample (``G - 1``)
    or of the population (``G``)."""
    anchor: PartName = "state"
    """The state by which ``gigpo`` and ``critic`` compare steps: ``prompt``, ``last_observation``,
    ``last_n`` (``options.last_n.n``) or ``state`` (:mod:`bridle.trainer.credit.anchors`), or a
    function as ``FILE.py:NAME``. ``state`` is the prompt, or the last observation and the role
    where prompts keep the history."""
    options: Options = field(default_factory=dict)
    """The own options of estimators and anchors, by their name, such as ``options.gigpo.discount``.
    ``bridle config --parts`` lists them."""
    role_rewards: Mapping[str, str | tuple[str, ...]] | None = None
    """Names of rewards by role: the sum of the session's rewards of these names is the role's own
    in ``per_role`` and ``spiral``, beside those that were given to the role itself. For a role that
    is not named here, it is the reward that has the role's name. A role without a reward of its own
    gets its session's number."""
    overlong_tokens: Natural = 0
    """Number of sampled tokens from which on a session's reward is reduced by 1. With 0, sessions
    are not punished for their length (:mod:`bridle.trainer.filters.overlong`)."""
    overlong_margin: Count = 1024
    """Number of tokens before ``overlong_tokens`` over which the punishment grows from 0 to 1."""
    reward_weights: Mapping[str, float] | None = None
    """The factor of each reward, by name. With ``None``, a session's number is its reward named
    ``reward`` alone if it has one, and otherwise the sum of all its rewards
    (:mod:`bridle.reconstruct.rewards`)."""
    reward_turns: Over | None = None
    """The aggregation of rewards of calls, branches and roles into the session's number, for names
    that the session as a whole was not given. With ``None`` they do not count in it; ``gigpo`` and
    ``turn_returns`` then use the return of the whole episode, as their papers do
    (:mod:`bridle.trainer.credit.steps`)."""
    reward_sources: Annotated[tuple[RewardSource, ...], Meta(min_length=1)] = (
        RewardSource.VERIFIER,
    )
    """The sources of rewards that count: ``verifier``, ``scorer`` (the run's scorers, whose rewards
    also count where ``reward_weights`` names them), and ``operator`` (the admin key and ``bridle
    reward``)."""


@dataclass(frozen=True, slots=True)
class DistillationConfig:
    """A teacher that scores the policy's own samples (:mod:`bridle.trainer.credit.distillation`).

    There is none with ``teacher = "served"`` and no ``url``.

    Groups whose rewards are all equal are trained too, because the teacher's scores still give
    their tokens advantages.
    """

    teacher: TeacherKind = "served"
    """The teacher: ``served`` at ``url``, or ``ema``, the exponential moving average of the policy
    itself (:mod:`bridle.trainer.learner.average`)."""
    decay: Share = 0.99
    """The share of the average that each step with an update leaves as it was. With 0 the teacher
    is the policy, and with 1 the policy as it was at the start."""
    context: str = ""
    """The text that the teacher's prompt holds and the policy's does not: ``outcome``, ``hint``,
    ``demonstration`` (:mod:`bridle.trainer.credit.privileged`), or a function as ``FILE.py:NAME``.
    Empty if the teacher sees what the policy saw."""
    place: ContextPlace = "user"
    """The place of the context: after the ``system`` message, or at the end of the last ``user``
    message before the sample's first trained token."""
    options: Options = field(default_factory=dict)
    """The own options of contexts, by their name, such as ``options.hint.field``."""
    url: str = ""
    """Base URL, without ``/v1``, of the engine that serves the teacher. Empty if none is served."""
    model: str = ""
    """The teacher's served name. If empty, the first model that the engine serves is used."""
    key_variable: str = ""
    """Name of the environment variable that holds the engine's key; the variable of that name with
    ``_FILE`` appended may give the path of a file with the key instead. Empty if the engine needs
    no key."""
    coefficient: AboveZero = 1.0
    """Advantage per nat by which the teacher's logprob of a token exceeds the policy's."""
    clip: AtLeastZero = 5.0
    """Largest difference of a token's logprobs that counts, in nats, up or down. With 0 there is no
    bound."""
    parallel: Count = 8
    """Number of samples that a served teacher scores at a time."""

    @property
    def teaches(self) -> bool:
        """Return whether there is a teacher."""
        return self.teacher == "ema" or bool(self.url)


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """The filters that leave sessions out of training."""

    drop_zero_variance: bool = True
    """Leave out groups in which all rewards are equal, because they teach nothing."""
    outcomes: Mapping[str, OutcomePolicy] = field(
        default_factory=lambda: {
            "infrastructure": "exclude",
            "cancelled": "exclude",
            "quarantined": "exclude",
            "timeout": "drop",
        }
    )
    """The treatment of sessions by outcome. ``train`` treats a session like any other. ``drop``
    counts it in the group's baseline but does not train on it. ``exclude`` does neither, because
    its reward says nothing about the policy. Sessions with other outcomes are trained on."""
    refill: Annotated[float, Meta(ge=1)] = 1.0
    """Limit on the groups that a step collects, as a multiple of its number of groups. Above 1, a
    group of which nothing is trained is replaced by another one until the step has its groups or
    reaches the limit: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""
    resample_on_correct: bool = False
    """Keep half of each group, preferring successes with few faulty tool calls: GRPO-RoC
    (:mod:`bridle.trainer.filters.resample_on_correct`)."""
    extra: tuple[PartName, ...] = ()
    """Further filters (:mod:`bridle.trainer.filters`): ``void_turn``, ``over_turn``, ``truncated``,
    ``failed_calls``, or those registered with ``register_filter``. Each drops sessions and records
    its name as the reason."""
    options: Options = field(default_factory=dict)
    """The own options of further filters, by the filter's name."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The replay of earlier steps' successes (:mod:`bridle.trainer.collection.replay`).

    The paper (SPEAR, arXiv 2509.22601) uses a buffer of 2048 sessions.
    """

    share: Share = 0.0
    """Number of replayed sessions in a step, as a fraction of the sessions that it collects,
    rounded. With 0 there is no replay."""
    buffer: Count = 512
    """Number of latest successes that are kept."""
    baselines: Count = 512
    """Number of latest groups whose mean rewards are kept. A session is replayed only if its reward
    exceeds the median of these means."""
    warmup_steps: Natural = 200
    """Number of steps over which the advantages of replayed sessions grow from 0, along half a
    cosine."""
    max_staleness: Natural = 10
    """Maximum number of policy versions that a replayed session may lag behind."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The policy-gradient loss. Its formulas are in :mod:`bridle.trainer.losses.losses`."""

    name: PartName = "clip"
    """The loss: ``clip``, ``gspo``, ``cispo``, ``aepo``, ``epo``, or one registered with
    ``register_loss``."""
    clip_low: Share = 0.2
    """The lower clip bound ε. In a step with several updates, a token with a negative advantage
    gets no gradient if its ratio to the policy at the start of the step is below ``1 - clip_low``.
    GSPO uses 3e-4. ``cispo`` has no lower bound."""
    clip_high: AtLeastZero = 0.28
    """The upper clip bound ε. DAPO makes it larger than ``clip_low`` (clip-higher). GSPO uses
    4e-4."""
    weighting: Weighting = "session"
    """The weighting of tokens against each other; see :mod:`bridle.trainer.credit.weighting`."""
    constant_tokens: Count = 1024
    """The normaliser L of ``weighting="constant"`` (Dr. GRPO), in tokens per session."""
    importance: PartName = "truncate"
    """The importance weights, which correct for the difference between the policy and the
    distribution that the engine reports: ``truncate``, ``mask``, ``sequence`` or ``none``
    (:mod:`bridle.trainer.losses.importance`), or a function as ``FILE.py:NAME``."""
    importance_cap: AboveZero = 2.0
    """The cap C, which is the largest importance weight."""
    importance_floor: AtLeastZero = 0.5
    """The floor F of ``mask``: tokens with a smaller ratio are not trained."""
    trust_region: PartName = "clip"
    """The trust region, outside of which tokens are not trained because the policy is too far from
    the distribution that sampled them: ``clip``, ``off_policy`` or ``none``
    (:mod:`bridle.trainer.losses.trust`), or a function as ``FILE.py:NAME``."""
    trust_low: Share = 0.2
    """The lower bound of ``clip``: a token with a negative advantage is not trained if its
    ``π / μ`` is below ``1 - trust_low``."""
    trust_high: AtLeastZero = 0.28
    """The upper bound of ``clip``: a token with a positive advantage is not trained if its
    ``π / μ`` is above ``1 + trust_high``."""
    trust_nats: AboveZero = 0.1
    """The bound of ``off_policy``: a token with a negative advantage is not trained if the tokens
    of its branch have become rarer by more than this, in nats per token on average."""
    entropy_floor: AtLeastZero = 0.0
    """The mean entropy of the trained tokens, in nats, that the policy should not fall below. After
    a step below it, an entropy bonus is on, whose coefficient grows with each such step and shrinks
    with each one above (:mod:`bridle.trainer.losses.entropy`). With 0 there is no bonus."""
    entropy_step: AboveZero = 0.005
    """The amount by which the coefficient of the entropy bonus grows or shrinks with a step."""
    kl_coefficient: AtLeastZero = 0.0
    """The coefficient β of the KL penalty to the reference policy, which is that of version 0.
    Unless β is 0, the reference is held in memory as a second model; with adapters it is the same
    model with the adapters off."""
    kl_corrected: bool = False
    """Weigh each token's KL estimate by its ``π / μ`` (DeepSeek-V3.2, arXiv 2512.02556, equation
    7), so that the expectation of the estimate and of its gradient is that of π."""
    options: Options = field(default_factory=dict)
    """The own options of losses, importance weights and trust regions, by their name."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    every: Count = 1
    """Number of steps between checkpoints."""
    keep: Count = 2
    """Number of newest checkpoints that are kept."""


@dataclass(frozen=True, slots=True)
class PublishConfig:
    through: Through = "directory"
    """The transport of new weights to the engine. ``directory`` writes them to disk, and the engine
    reads them there. ``transfer`` sends them from memory to a vLLM server and writes them
    afterwards. ``lora`` publishes the LoRA adapters alone, to a vLLM server that keeps the model
    below them; several policies then share one engine."""
    transfer_address: str = "127.0.0.1"
    """The address at which the trainer listens while it sends weights: loopback, or its address in
    a private network."""
    transfer_backend: TransferBackend = "gloo"
    """The backend of ``transfer``. ``gloo`` goes through the hosts' memory, ``nccl`` goes between
    different GPUs."""
    tolerance: AtLeastZero | None = None
    """Largest mean |engine logprob − trainer logprob| over the probes with which a publish
    succeeds, in nats. ``None`` means 1e-3, or 0.1 if the trainer computes in bfloat16."""
    keep: Count = 2
    """Number of newest published versions that stay on disk. The one being served always stays."""
    pause_mode: Literal["keep", "wait", "abort"] = "wait"
    """The treatment of replies in flight: ``keep`` freezes and continues them, ``wait`` finishes
    them first, and ``abort`` cuts them off."""


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """The calls of a session that are trained."""

    kinds: tuple[TrainedKind, ...] = ("main", "subagent", "unknown")
    """Kinds of calls that are trained. With ``compaction``, the summaries from which a conversation
    continues are trained too, by the reward of their session (SUPO, arXiv 2510.06727)."""


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """The settings of one GRPO run."""

    steps: Count = 100
    """Number of GRPO steps."""
    seconds: AtLeastZero | None = None
    """Time limit of the run in seconds, if its steps do not end first. The learning rate then
    follows the time and completes its schedule when the run ends. ``None`` means no limit."""
    minibatches: Count = 1
    """Number of optimizer updates per pass over a step's sessions. Each group goes to one of them
    as a whole."""
    epochs: Count = 1
    """Number of passes over a step's sessions."""
    max_staleness: Natural = 0
    """Maximum number of policy versions that a trained token may lag behind. With 0 the run
    collects, trains and publishes in turn. With n the groups of up to n steps run ahead of training
    (:mod:`bridle.trainer.collection`). Tokens that lag more are masked and counted. Replayed
    sessions have a limit of their own. With ``collection = "sessions"`` it is the mean lag."""
    collection: Literal["groups", "sessions"] = "groups"
    """The unit that a step takes: whole ``groups``, or single ``sessions`` as soon as siblings with
    other rewards have ended (:mod:`bridle.trainer.collection.sessions`)."""
    max_age: Count = 16
    """Maximum number of policy versions that a trained token may lag behind with ``collection =
    "sessions"``. Tokens that lag more are masked and counted."""
    replay_routing: Literal["auto", "off"] = "auto"
    """Compute a policy with experts with those that its engine chose (Rollout
    Routing Replay, arXiv 2510.11370). ``auto`` replays them wherever they are recorded."""
    seed: Natural = 0
    """The random seed of the order of tasks, minibatches, replay, ``resample_on_correct`` and new
    adapters."""
    sinks: tuple[PartName, ...] = ("tensorboard",)
    """Trackers that receive the run's numbers in addition to the store: ``tensorboard``, ``wandb``,
    ``mlflow``, ``trackio`` (:mod:`bridle.trainer.sinks`)."""
    token_scores: bool = True
    """Keep the trainer's logprob of each trained token, and the entropy of its distribution, in the
    store: at most 8 bytes a token."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    compute: ComputeConfig = ComputeConfig()
    packing: PackingConfig = PackingConfig()
    samples: SampleConfig = SampleConfig()
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    distillation: DistillationConfig = DistillationConfig()
    filters: FilterConfig = field(default_factory=FilterConfig)
    replay: ReplayConfig = ReplayConfig()
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoints: CheckpointConfig = CheckpointConfig()
    publish: PublishConfig = PublishConfig()

    @property
    def oldest_lag(self) -> int:
        """Maximum number of policy versions that a trained token may lag behind."""
        return self.max_age if self.collection == "sessions" else self.max_staleness


@dataclass(frozen=True, slots=True)
class SftConfig:
    """The settings of supervised fine-tuning on masked tokens, or on preferences."""

    loss: Literal["sft", "dpo", "kto"] = "sft"
    """The loss: ``sft`` (likelihood of the trained tokens), ``dpo`` on pairs, or ``kto`` on replies
    with labels. The latter two are TRL's (:mod:`bridle.trainer.sft.preference`)."""
    beta: AboveZero = 0.1
    """The weight of ``dpo`` and ``kto`` on staying near the policy as it was."""
    epochs: Count = 1
    """Number of passes over the examples."""
    batch_size: Count = 32
    """Number of examples per optimizer update."""
    seed: Natural = 0
    """The random seed of the order of examples and of new adapters."""
    optimizer: OptimizerConfig = OptimizerConfig(schedule="cosine", warmup_steps=10)
    lora: LoraConfig = LoraConfig()
    compute: ComputeConfig = ComputeConfig()
    packing: PackingConfig = PackingConfig()
