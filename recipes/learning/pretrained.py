"""A benchmark of estimators and losses that teach a pretrained model the demo's questions.

It counts the sessions that each needs. A case trains SmolLM2-135M-Instruct inside the demo's
LangChain app. The settings are the demo's, except for the case's credit and loss. A session is two
questions in one conversation, so that credit for the steps of a long session is not measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Final

from bridle.recipes.demo.course import StaffList
from bridle.recipes.demo.settings import PRETRAINED, DemoSettings
from bridle.recipes.demo.stages import Places, grpo_config, train_policy
from bridle.recipes.learning.method import Method
from bridle.recipes.learning.runs import LearningFigures, LearningSettings, rows
from bridle.recipes.models.smollm2 import smollm2_directory
from bridle.run.stack import stack
from bridle.store.records import RunRecord, new_id
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer
from bridle.trainer.report import StepReport

CASES: Final = ("grpo", "leave_one_out", "mean", "gspo", "cispo", "importance mask")
"""The methods that are measured unless others are named."""


def demo_settings(groups: int, group_size: int, device: str = "cpu") -> DemoSettings:
    """Return the demo's settings with steps of another size, and as many sessions in all.

    ``device`` is PyTorch's name of the device that trains and serves.
    """
    most = PRETRAINED.max_steps * PRETRAINED.groups * PRETRAINED.group_size
    return replace(
        PRETRAINED,
        groups=groups,
        group_size=group_size,
        max_steps=max(1, most // (groups * group_size)),
        device=device,
        checkpoint_every=1000,  # one takes 1.6 GB
    )


def bench_pretrained(
    case: Method, settings: LearningSettings, demo: DemoSettings, say: Callable[[str], None]
) -> list[int | None]:
    """Return the number of sessions until the goal by seed.

    It is ``None`` for a seed that does not reach the goal.
    """
    needed = []
    for seed in settings.every_seed:
        rewards = rewards_by_step(case, settings, replace(demo, seed=seed), say)
        reached = reached_goal(rewards, settings)
        needed.append(len(rewards) * demo.groups * demo.group_size if reached else None)
    return needed


def rewards_by_step(
    case: Method, settings: LearningSettings, demo: DemoSettings, say: Callable[[str], None]
) -> list[float]:
    """Return the mean reward of each step's sessions, until the goal or the demo's last step."""
    rewards: list[float] = []

    def on_step(report: StepReport) -> bool:
        rewards.append(report.reward_mean)
        say(f"{case.name}, seed {demo.seed}, step {len(rewards)}: {report.reward_mean:.2f}")
        return reached_goal(rewards, settings)

    config = case.configured(grpo_config(demo, None))
    with TemporaryDirectory(prefix="bridle-learning-") as folder:
        places = Places(Path(folder))
        places.warm.parent.mkdir(parents=True)
        places.warm.symlink_to(smollm2_directory(), target_is_directory=True)
        migrate(places.store)
        run = RunRecord(new_id("run"), "bench", time.time(), name=case.name)
        with Writer(places.store) as writer:
            writer.add_sync(run)
        placed = ("--device", demo.device)
        with stack(places.warm, places.store, places.logs, engine_arguments=placed) as running:
            train_policy(
                StaffList(), running, places, demo, config, run.id, lambda _result: None, on_step
            )
    return rewards


def reached_goal(rewards: Sequence[float], settings: LearningSettings) -> bool:
    """Return whether the mean reward of the last ``settings.window`` steps is at the goal."""
    return len(rewards) >= settings.window and mean(rewards[-settings.window :]) >= settings.goal


def table(found: Sequence[LearningFigures], settings: LearningSettings, demo: DemoSettings) -> str:
    """Return the published table as Markdown."""
    size = demo.groups * demo.group_size
    lines = [
        "# What teaches a pretrained model how fast",
        "",
        "Written by `bridle bench learning --pretrained --table`. The demo's LangChain app with",
        "SmolLM2-135M-Instruct in it, and the demo's settings but for the case's credit or loss:",
        f"{demo.groups} groups of {demo.group_size} sessions a step, AdamW at "
        f"{demo.learning_rate}, seeds from {settings.first_seed}",
        f"on. A run ends when the mean reward of {settings.window} steps is {settings.goal}, or "
        f"after {demo.max_steps * size} sessions.",
        "",
        *rows(found, settings),
        "",
    ]
    return "\n".join(lines)
