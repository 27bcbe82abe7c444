"""The demo's sizes, for either policy. The whole of it fits in minutes on two cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bridle.run.environment import DemoPolicy, EngineKind
from bridle.trainer.config import ComputeConfig
from bridle.trainer.policy.tiny import TinyShape


@dataclass(frozen=True, slots=True)
class Lesson:
    """Some epochs of fine-tuning on the teacher's demonstrations."""

    epochs: int
    learning_rate: float
    """The peak: it rises over 30 updates at most, then falls like a cosine."""
    final_fraction: float = 0.05
    """Where the learning rate ends, as a fraction of its peak; 1 where another lesson goes on."""
    batch_size: int = 16
    """Demonstrations per update."""
    sessions: int | None = None
    """Demonstrations, the first ones; ``None``: all."""
    context: int | None = None
    """Tokens seen before a demonstration's first reply; ``None``: all. To copy from a prompt is
    learned in hundreds of updates, and behind a long one each would cost seconds; so first comes
    its end alone, then the same with all that stands before it."""
    shared: int | None = None
    """Tokens kept at each border of what all prompts share, for prompts that name the task before
    their end; ``None``: all."""
    piece: int = 0
    """With ``shared``, most tokens of a piece of what it leaves out, drawn anew for each epoch:
    tokens that a policy has never seen between a task and its reply lead it astray when they come,
    and so do distances."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One demo run. What is not said otherwise is right for the tiny policy."""

    policy: DemoPolicy = "tiny"

    seed: int = 0
    engine: EngineKind = "embedded"
    """What serves the policy."""
    device: str = "cpu"
    """PyTorch's name of what trains the policy, and of what the embedded engine computes it on; in
    float32, whatever it is, so that both compute the same."""
    shape: TinyShape = field(
        default_factory=lambda: TinyShape(layers=3, hidden=128, intermediate=128, context=2048)
    )
    vocab_size: int = 1024
    first_sessions: int = 32
    """Sessions recorded for the tokenizer's corpus, before there is a policy."""
    teacher_sessions: int = 2000
    teacher_skill: float = 0.45
    """Share of demonstrations in which the teacher computes with the right operation."""
    lessons: Sequence[Lesson] = (
        Lesson(epochs=5, learning_rate=3e-3, final_fraction=1.0, shared=16),
        Lesson(epochs=3, learning_rate=3e-3),
    )
    """The warm start, one after another."""
    eval_tasks: int = 200
    """Held-out questions asked before and after, at the training temperature."""
    greedy_tasks: int = 100
    """Of these so many are asked greedily, too: no draw of a token blurs that figure."""
    learning_rate: float = 3e-4
    final_fraction: float = 0.1
    """Where the learning rate ends, as a fraction of its peak: the last steps settle what is
    learned rather than chase the few sessions that still fail."""
    adam_eps: float = 1e-4
    """A policy that is nearly certain of most tokens has tiny gradients there; with the usual eps
    Adam would turn their noise into full steps and wear down what the warm start has learned."""
    max_steps: int = 12
    groups: int = 16
    """Questions per GRPO step."""
    group_size: int = 8
    """Sessions per question."""
    minibatches: int = 2
    """Optimizer updates per pass over a step's sessions."""
    epochs: int = 3
    """Passes over a step's sessions."""
    goal: float = 0.97
    """Mean reward of a step's sessions, over the last three steps, at which training ends."""
    minutes: float = 11.5
    """Longest time of the whole demo. The teacher's recording ends at :data:`TEACHER_SHARE` of it
    and the warm start at :data:`WARM_SHARE`, with what they have by then. Training ends, goal or
    not, and its learning rate with it, when only so much is left as measuring took before.
    :data:`VLLM_MINUTES` with vLLM unless set."""
    update_threads: int = 1
    """PyTorch's threads in an update, while nothing else runs."""
    checkpoint_every: int = 1
    """GRPO steps."""
    parallel: int = 16
    """Sessions at a time."""
    timeout_s: float = 60.0

    @property
    def compute(self) -> ComputeConfig:
        return ComputeConfig(device=self.device, precision="float32")


TEACHER_SHARE: Final = 0.5
"""Share of the demo's time after which no demonstration is begun."""
WARM_SHARE: Final = 0.75
"""Share of the demo's time after which the warm start ends."""
FEWEST_DEMONSTRATIONS: Final = 64
"""Recorded however little time there is: a warm start needs some."""

VLLM_MINUTES = 22.0
"""On two cores vLLM needs more of them for the same sessions."""


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
"""A checkpoint is 1.6 GB, its weights and Adam's moments."""


def settings_of(policy: DemoPolicy) -> DemoSettings:
    return PRETRAINED if policy == "smollm2" else DemoSettings()
