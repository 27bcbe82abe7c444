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
from bridle.recipes.demo.settings import PRETRAINED
from bridle.recipes.demo.stages import Places, grpo_config, train_policy
from bridle.recipes.learning.methods import Method
from bridle.recipes.learning.runs import LearningFigures, LearningSettings, rows
from bridle.recipes.models.smollm2 import smollm2_directory
from bridle.run.stack import stack
from bridle.store.records import RunRecord, new_id
from bridle.store.schema.database import migrate
from bridle.store.writing.writer import Writer
from bridle.trainer.report import StepReport

CASES: Final = ("grpo", "leave_one_out", "mean", "gspo", "cispo", "importance mask")
"""The methods that are measured unless others are named."""
LONGEST_S: Final = 1800.0
SETTINGS: Final = replace(PRETRAINED, checkpoint_every=1000)
"""The demo's settings, without its checkpoints of 1.6 GB each."""


def bench_pretrained(
    case: Method, settings: LearningSettings, device: str, say: Callable[[str], None]
) -> list[int | None]:
    """Return the number of sessions until the goal by seed.

    It is ``None`` for a seed that does not reach the goal. ``device`` is PyTorch's name of the
    device that trains and serves.
    """
    needed = []
    for seed in settings.every_seed:
        rewards = rewards_by_step(case, settings, seed, device, say)
        reached = reached_goal(rewards, settings)
        sessions = len(rewards) * SETTINGS.groups * SETTINGS.group_size
        needed.append(sessions if reached else None)
    return needed


def rewards_by_step(
    case: Method, settings: LearningSettings, seed: int, device: str, say: Callable[[str], None]
) -> list[float]:
    """Return the mean reward of each step's sessions, until the goal or the demo's last step."""
    rewards: list[float] = []

    def on_step(report: StepReport) -> bool:
        rewards.append(report.reward_mean)
        say(f"{case.name}, seed {seed}, step {len(rewards)}: {report.reward_mean:.2f}")
        return reached_goal(rewards, settings)

    demo = replace(SETTINGS, seed=seed, device=device)
    config = case.configured(grpo_config(demo, LONGEST_S))
    with TemporaryDirectory(prefix="bridle-learning-") as folder:
        places = Places(Path(folder))
        places.warm.parent.mkdir(parents=True)
        places.warm.symlink_to(smollm2_directory(), target_is_directory=True)
        migrate(places.store)
        run = RunRecord(new_id("run"), "bench", time.time(), name=case.name)
        with Writer(places.store) as writer:
            writer.add_sync(run)
        placed = ("--device", device)
        with stack(places.warm, places.store, places.logs, engine_arguments=placed) as running:
            train_policy(
                StaffList(), running, places, demo, config, run.id, lambda _result: None, on_step
            )
    return rewards


def reached_goal(rewards: Sequence[float], settings: LearningSettings) -> bool:
    """Return whether the mean reward of the last ``settings.window`` steps is at the goal."""
    return len(rewards) >= settings.window and mean(rewards[-settings.window :]) >= settings.goal


def table(found: Sequence[LearningFigures], settings: LearningSettings) -> str:
    """Return the published table as Markdown."""
    size = SETTINGS.groups * SETTINGS.group_size
    lines = [
        "# What teaches a pretrained model how fast",
        "",
        "Written by `bridle bench learning --pretrained --table`. The demo's LangChain app with",
        "SmolLM2-135M-Instruct in it, and the demo's settings but for the case's credit or loss:",
        f"{size} sessions a step, AdamW at {SETTINGS.learning_rate}. A run ends when the mean",
        f"reward of {settings.window} steps is {settings.goal}, or after",
        f"{SETTINGS.max_steps * size} sessions.",
        "",
        *rows(found, settings),
        "",
    ]
    return "\n".join(lines)
