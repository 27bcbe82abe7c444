"""The demo's sizes, for either policy. The whole demo takes minutes on two cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from bridle.recipes.demo import DemoPolicy
from bridle.recipes.models.tiny import TinyShape
from bridle.run.environment import EngineKind
from bridle.run.settings import parse_overrides, settings_from
from bridle.trainer.collection.branching import Where
from bridle.trainer.config import AtLeastZero, ComputeConfig, Count, Natural, Share


@dataclass(frozen=True, slots=True)
class Lesson:
    """A number of epochs of fine-tuning on the teacher's demonstrations."""

    epochs: int
    learning_rate: float
    """The peak learning rate. The rate rises to it over 30 updates at most, then falls like a
    cosine."""
    final_fraction: float = 0.05
    """The learning rate at the end, as a fraction of its peak; 1 if another lesson continues from
    it."""
    batch_size: int = 16
    """Number of demonstrations per update."""
    sessions: int | None = None
    """Number of demonstrations, from the first on; ``None`` stands for all."""
    context: int | None = None
    """Number of tokens seen before a demonstration's first reply; ``None`` stands for all. A policy
    needs hundreds of updates to learn to copy from a prompt, and each would take seconds with a
    long prompt. The first lesson therefore shows only the prompt's end, and later ones all of
    it."""
    shared: int | None = None
    """Number of tokens kept at each border of the text that all prompts share, for prompts that
    name the task before their end; ``None`` stands for all."""
    piece: int = 0
    """Maximum tokens of a piece of the text that ``shared`` leaves out, which is drawn anew for
    each epoch. Otherwise a policy fails when tokens that it has never seen, or longer distances,
    come between a task and its reply."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The settings of one demo run. The defaults are those of the tiny policy."""

    policy: DemoPolicy = "tiny"

    seed: Natural = 0
    engine: EngineKind = "embedded"
    """The engine that serves the policy."""
    device: str = "cpu"
    """PyTorch's name of the device that trains the policy, and that the embedded engine computes
    on. Both compute in float32 on any device, so that they compute the same."""
    shape: TinyShape = field(
        default_factory=lambda: TinyShape(layers=3, hidden=128, intermediate=128, context=2048)
    )
    vocab_size: int = 1024
    first_sessions: int = 32
    """Number of sessions recorded for the tokenizer's corpus, before there is a policy."""
    teacher_sessions: Count = 2000
    teacher_skill: float = 0.45
    """The share of demonstrations in which the teacher computes with the right operation."""
    lessons: tuple[Lesson, ...] = (
        Lesson(epochs=5, learning_rate=3e-3, final_fraction=1.0, shared=16),
        Lesson(epochs=3, learning_rate=3e-3),
    )
    """The lessons of the warm start, in order."""
    eval_tasks: Count = 200
    """Number of held-out questions asked before and after, at the training temperature."""
    greedy_tasks: int = 100
    """Number of these questions that are also asked greedily; that figure has no noise from drawing
    tokens."""
    learning_rate: AtLeastZero = 3e-4
    warmup_steps: Natural = 0
    """Number of steps over which the learning rate rises to its peak. The demo has a dozen steps, a
    warm start before them, and an ``adam_eps`` that bounds the first ones."""
    final_fraction: float = 0.1
    """The learning rate at the end, as a fraction of its peak. At a low rate, the last steps
    consolidate what is learned and do not chase the few sessions that still fail."""
    adam_eps: float = 1e-4
    """The ``eps`` of Adam. A policy that is nearly certain of most tokens has tiny gradients there.
    With the usual value, Adam would turn their noise into full steps and wear down the result of
    the warm start."""
    max_steps: Count = 12
    groups: Count = 16
    """Number of questions per GRPO step."""
    group_size: Count = 8
    """Number of sessions per question."""
    branch: Share = 0.0
    """The share of groups whose sessions re-enter an earlier session of the training, as
    ``groups.branch`` of a run (``docs/re-entry.md``)."""
    branch_at: Where = "random"
    """The call at which they re-enter it, as ``groups.branch_at`` of a run."""
    baseline: str = "grpo"
    """The estimator of advantages, as ``training.advantages.baseline`` of a run."""
    collection: Literal["groups", "sessions"] = "groups"
    """The collection of a step's sessions, as ``training.collection`` of a run. By ``sessions``,
    weights are published while sessions run, and ``baseline`` should be ``leave_one_out``."""
    max_staleness: Natural = 0
    """Number of policy versions that sessions may lag behind, as ``training.max_staleness`` of a
    run. By ``sessions`` it is the mean lag, of 1 or more."""
    minibatches: int = 2
    """Number of optimizer updates per pass over a step's sessions."""
    epochs: int = 3
    """Number of passes over a step's sessions."""
    goal: float = 0.97
    """The mean reward of a step's sessions, over the last three steps, at which training ends."""
    minutes: AtLeastZero = 11.5
    """Maximum minutes of the whole demo. The teacher's recording ends at :data:`TEACHER_SHARE` of
    them and the warm start at :data:`WARM_SHARE`, with what they have by then. Training ends, with
    or without reaching the goal, when only as much time is left as measuring took before; the
    schedule of its learning rate ends with it. The default with vLLM is :data:`VLLM_MINUTES`."""
    update_threads: int = 1
    """Number of PyTorch threads in an update, while nothing else runs."""
    checkpoint_every: int = 1
    """Number of GRPO steps between checkpoints."""
    parallel: Count = 16
    """Maximum number of sessions at a time."""
    timeout_s: float = 60.0

    @property
    def compute(self) -> ComputeConfig:
        return ComputeConfig(device=self.device, precision="float32")


TEACHER_SHARE: Final = 0.5
"""The share of the demo's time after which no demonstration is begun."""
WARM_SHARE: Final = 0.75
"""The share of the demo's time after which the warm start ends."""
FEWEST_DEMONSTRATIONS: Final = 64
"""The number of demonstrations that are recorded even if time is short: a warm start needs some."""

VLLM_MINUTES = 22.0
"""The minutes with vLLM, which needs more of them on two cores for the same sessions."""


PRETRAINED: Final = DemoSettings(
    policy="smollm2",
    eval_tasks=120,
    greedy_tasks=60,
    learning_rate=2e-5,
    adam_eps=1e-8,
    max_steps=20,
    groups=8,
    group_size=8,
    minibatches=1,
    epochs=1,
    update_threads=2,
    checkpoint_every=4,
    parallel=16,
    timeout_s=600.0,
)
"""The settings of the pretrained policy. Its checkpoints take 1.6 GB each: weights and Adam's
moments."""


def with_changes(settings: DemoSettings, assignments: Sequence[str]) -> DemoSettings:
    """Return ``settings`` with the values of ``NAME=VALUE`` texts.

    Raise :class:`bridle.run.settings.SettingsError`.
    """
    return settings_from(
        DemoSettings,
        defaults=msgspec.to_builtins(settings),
        overrides=parse_overrides(assignments),
    )


def settings_of(policy: DemoPolicy) -> DemoSettings:
    return PRETRAINED if policy == "smollm2" else DemoSettings()
