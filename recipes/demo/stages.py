"""The demo's stages: make a policy, record a teacher, learn from the recording, measure, train."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import ScriptedEngine
from bridle.errors import BridleError
from bridle.harnesses.episode import Outcome
from bridle.harnesses.rollout import Job, RolloutResult, RolloutSettings
from bridle.harnesses.tasks.task import Task
from bridle.recipes.demo.corpus import recorded_corpus
from bridle.recipes.demo.course import Course, TaughtCourse
from bridle.recipes.demo.settings import FEWEST_DEMONSTRATIONS, DemoSettings, Lesson
from bridle.recipes.models.tiny import make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.exports.chat_jsonl import export_chat
from bridle.reconstruct.exports.parquet import export_parquet
from bridle.reconstruct.exports.selection import Selection
from bridle.reconstruct.rewards import Aggregation
from bridle.run.branching import Branches
from bridle.run.config import GroupsConfig
from bridle.run.groups import FinishedGroups, key_of, planned
from bridle.run.stack import MODEL, Stack, proxy
from bridle.run.training import train
from bridle.run.training_plan import TrainingPlan
from bridle.store.reading.queries import Reader
from bridle.threads import usable_cores
from bridle.trainer.config import (
    AdvantageConfig,
    CheckpointConfig,
    FilterConfig,
    GrpoConfig,
    OptimizerConfig,
    PackingConfig,
    PublishConfig,
    SftConfig,
)
from bridle.trainer.learner.learner import Learner
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.model import load_policy, save_policy
from bridle.trainer.report import StepReport
from bridle.trainer.sft.data import examples_from_parquet, with_context, without_shared
from bridle.trainer.sft.sft import SftStep, steps_of, train_sft

LONGEST_PROMPT: Final = 1 << 20
"""Maximum tokens of a prompt. The first tokenizer knows few words, so a prompt may take tens of
thousands."""
OnResult = Callable[[RolloutResult], None]


class NothingRecorded(BridleError):
    """The agent failed in every session: there is nothing to learn from."""


@dataclass(frozen=True, slots=True)
class Places:
    """The files of a demo run."""

    root: Path
    recorded: str | None = None
    """The store of a proxy that runs already; ``None`` stands for a store in ``root``."""
    workspaces: Path | None = None
    """The folder in which sessions run; ``None`` stands for one in ``root``."""

    @property
    def store(self) -> str:
        return self.recorded or str(self.root / "bridle.db")

    @property
    def first(self) -> Path:
        return self.root / "policy" / "first"

    @property
    def base(self) -> Path:
        return self.root / "policy" / "base"

    @property
    def warm(self) -> Path:
        """The policy from which GRPO starts."""
        return self.root / "policy" / "warm"

    def lesson(self, number: int) -> Path:
        """Return the directory of the policy after the lesson with that number, from 0."""
        return self.root / "policy" / f"lesson-{number}"

    @property
    def trained(self) -> Path:
        return self.root / "policy" / "trained"

    @property
    def teacher_data(self) -> Path:
        return self.root / "teacher.parquet"

    @property
    def training(self) -> Path:
        return self.root / "training"

    @property
    def sessions(self) -> Path:
        return self.workspaces or self.root / "sessions"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def make_base_policy(
    course: TaughtCourse, places: Places, settings: DemoSettings, run_id: str, progress: OnResult
) -> None:
    """Make a policy of random weights and train a tokenizer on a first recording of the agent."""
    train_tokenizer(places.first, course.first_corpus(), vocab_size=512)
    tasks = course.tasks("train", settings.teacher_sessions, settings.seed)
    record(
        course, places, settings, places.first, tasks[: settings.first_sessions], run_id, progress
    )
    conversations = places.root / "first.jsonl"
    with Reader(places.store) as reader:
        export_chat(reader, conversations, Selection(run=run_id, outcome="completed"))
    size = train_tokenizer(
        places.base,
        recorded_corpus(conversations, Tokenizer(places.first)),
        vocab_size=settings.vocab_size,
        min_frequency=settings.first_sessions // 2,
    )
    make_policy(places.base, settings.shape, vocab_size=size, seed=settings.seed)


def record_teacher(
    course: TaughtCourse,
    places: Places,
    settings: DemoSettings,
    run_id: str,
    progress: OnResult,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Record the teacher's demonstrations with the policy's tokenizer, and export them.

    Once ``over()`` returns true, only demonstrations that are needed are begun.
    """
    tasks = course.tasks("train", settings.teacher_sessions, settings.seed)
    record(course, places, settings, places.base, tasks, run_id, progress, over)
    with Reader(places.store) as reader:
        export_parquet(reader, places.teacher_data, Selection(run=run_id, outcome="completed"))


def record(
    course: TaughtCourse,
    places: Places,
    settings: DemoSettings,
    tokenizer: Path,
    tasks: Sequence[Task],
    run_id: str,
    progress: OnResult,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Serve the scripted teacher behind the proxy, and record the real agent that uses it.

    Once ``over()`` returns true, tasks are left out, except for the first
    :data:`FEWEST_DEMONSTRATIONS`. Raise :class:`NothingRecorded` if no session completes.
    """
    script = course.teacher(tasks, settings.teacher_skill)
    with (
        ScriptedEngine(
            tokenizer, script, served_model_name=MODEL, max_model_len=LONGEST_PROMPT
        ) as engine,
        proxy(engine.base_url, tokenizer, places.store, places.logs) as (proxy_url, key),
        course.rollouts(proxy_url, key) as rollouts,
    ):
        left = left_over(tasks, places, run_id, {Outcome.COMPLETED})
        needed = FEWEST_DEMONSTRATIONS - (len(tasks) - len(left))
        jobs = (
            Job(task)
            for _, task in itertools.takewhile(
                lambda one: one[0] < needed or not over(), enumerate(left)
            )
        )
        results = rollouts.collect(
            course.agent(1.0), jobs, rollout_settings(course, places, settings, run_id), progress
        )
    completed = any(result.outcome is Outcome.COMPLETED for result in results)
    if results and not completed and len(left) == len(tasks):
        last = results[-1]
        why = last.error or f"exit code {last.exit_code}"
        raise NothingRecorded(
            f"no session of {len(results)} completed; the last one: {last.outcome}, {why}. "
            f"Output of their agents: {places.sessions}"
        )


def warm_start(
    places: Places, settings: DemoSettings, on_step: Callable[[SftStep], bool | None]
) -> None:
    """Fine-tune the base policy on the teacher's export.

    Lessons that a stopped attempt completed are kept. ``on_step`` may return true to end its
    lesson.
    """
    taught = lessons_taught(places, settings)
    start = places.lesson(taught - 1) if taught else places.base
    model = load_policy(start, compute=settings.compute)
    examples = examples_from_parquet(places.teacher_data)
    with torch_threads(2):
        for number, lesson in enumerate(settings.lessons[taught:], taught):
            seen = examples[: lesson.sessions]
            if lesson.shared is not None:
                seen = [
                    example
                    for draw in range(_draws(lesson))
                    for example in without_shared(seen, lesson.shared, lesson.piece, seed=draw)
                ]
            if lesson.context is not None:
                seen = [with_context(example, lesson.context) for example in seen]
            config = sft_config(lesson, settings)
            learner = Learner(model, config)
            train_sft(learner, seen, config, on_step=on_step)
            partial = places.lesson(number).with_suffix(".tmp")
            save_policy(model, partial, places.base)
            partial.replace(places.lesson(number))
    save_policy(model, places.warm, places.base)
    for number in reversed(range(len(settings.lessons))):
        shutil.rmtree(places.lesson(number))


def lessons_taught(places: Places, settings: DemoSettings) -> int:
    """Return the number of lessons that an earlier attempt completed."""
    return sum(places.lesson(number).exists() for number in range(len(settings.lessons)))


@contextmanager
def torch_threads(most: int) -> Iterator[None]:
    """Compute with ``most`` PyTorch threads in the context, or fewer if there are fewer cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(most, usable_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sft_config(lesson: Lesson, settings: DemoSettings) -> SftConfig:
    """Return the fine-tuning configuration of one lesson."""
    return SftConfig(
        epochs=lesson.epochs // _draws(lesson),
        batch_size=lesson.batch_size,
        seed=settings.seed,
        optimizer=OptimizerConfig(
            learning_rate=lesson.learning_rate,
            warmup_steps=min(30, _updates(lesson, settings) // 4),
            schedule="cosine",
            final_fraction=lesson.final_fraction,
        ),
        packing=PackingConfig(block_tokens=64),
    )


def warm_start_updates(settings: DemoSettings, lessons: int | None = None) -> int:
    """Return the number of optimizer updates of the first ``lessons`` lessons.

    ``None`` stands for all lessons.
    """
    return sum(_updates(lesson, settings) for lesson in settings.lessons[:lessons])


def _updates(lesson: Lesson, settings: DemoSettings) -> int:
    draws = _draws(lesson)
    examples = min(lesson.sessions or settings.teacher_sessions, settings.teacher_sessions)
    return steps_of(examples * draws, lesson.epochs // draws, lesson.batch_size)


def _draws(lesson: Lesson) -> int:
    """Return the number of times that the lesson's examples are made.

    They are made once per epoch if pieces are drawn, and otherwise once.
    """
    return lesson.epochs if lesson.piece else 1


def evaluate(
    course: Course,
    stack: Stack,
    places: Places,
    settings: DemoSettings,
    run_id: str,
    count: int,
    temperature: float,
    progress: OnResult,
) -> None:
    """Ask those of ``count`` held-out questions that ``run_id`` has not asked yet.

    The rewards go to the store.
    """
    tasks = course.tasks("held_out", count, settings.seed)
    measured = {Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.TIMEOUT}
    with course.rollouts(stack.proxy_url, stack.admin_key) as rollouts:
        rollouts.collect(
            course.agent(temperature),
            [Job(task) for task in left_over(tasks, places, run_id, measured)],
            rollout_settings(course, places, settings, run_id, temperature),
            progress,
        )


def left_over(
    tasks: Sequence[Task], places: Places, run_id: str, ended: Collection[Outcome]
) -> list[Task]:
    """Return the tasks without a session in ``run_id`` whose outcome is in ``ended``.

    In a new run, return all of them.
    """
    with Reader(places.store) as reader:
        done = {s.task_id for s in reader.sessions(run=run_id, sealed=True) if s.outcome in ended}
    return [task for task in tasks if task.id not in done]


def rollout_settings(
    course: Course,
    places: Places,
    settings: DemoSettings,
    run_id: str,
    temperature: float = 1.0,
) -> RolloutSettings:
    return RolloutSettings(
        session_settings=course.session_settings(temperature),
        directory=places.sessions,
        parallel=settings.parallel,
        timeout_s=settings.timeout_s,
        model=MODEL,
        run_id=run_id,
    )


def train_policy(
    course: Course,
    stack: Stack,
    places: Places,
    settings: DemoSettings,
    config: GrpoConfig,
    run_id: str,
    on_session: OnResult,
    on_step: Callable[[StepReport], bool],
) -> GrpoLoop:
    """Run GRPO from the policy that ``stack`` serves, or continue an earlier attempt at ``run_id``.

    Training ends when ``on_step`` returns true.
    """
    tasks = course.tasks("train", seed=settings.seed + 1)
    with Reader(places.store) as reader:
        finished = FinishedGroups.of(reader, run_id)
    keys = {task.id: key_of(task) for task in tasks}
    with (
        Reader(places.store) as recorded,
        course.rollouts(stack.proxy_url, stack.admin_key) as rollouts,
        torch_threads(settings.update_threads),
    ):
        branching = GroupsConfig(
            settings.groups,
            settings.group_size,
            branch=settings.branch,
            branch_at=settings.branch_at,
        )
        branches = Branches(recorded, branching, settings.seed)

        def on_result(result: RolloutResult) -> None:
            reward = Aggregation().value(result.rewards)
            if reward is not None and result.session_id is not None:
                task = keys[result.task_id]
                branches.learn(result.session_id, result.group_id, task, reward >= 1)
            on_session(result)

        return train(
            TrainingPlan(
                policy=places.warm,
                directory=places.training,
                store=places.store,
                run_id=run_id,
                config=config,
                groups_per_step=settings.groups,
            ),
            stack,
            rollouts.groups(
                course.agent(1.0),
                planned(run_id, tasks, settings.group_size, finished, branch=branches),
                rollout_settings(course, places, settings, run_id),
                on_result,
            ),
            on_step=on_step,
        )


def grpo_config(settings: DemoSettings, seconds: float | None) -> GrpoConfig:
    """Return the demo's GRPO configuration: clipped, and on-policy unless sessions may lag."""
    return GrpoConfig(
        steps=settings.max_steps,
        seconds=seconds,
        minibatches=settings.minibatches,
        epochs=settings.epochs,
        seed=settings.seed,
        max_staleness=settings.max_staleness,
        collection=settings.collection,
        publish=PublishConfig(pause_mode="keep" if settings.collection == "sessions" else "wait"),
        optimizer=OptimizerConfig(
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            eps=settings.adam_eps,
            schedule="cosine",
            final_fraction=settings.final_fraction,
        ),
        compute=settings.compute,
        checkpoints=CheckpointConfig(every=settings.checkpoint_every, keep=2),
        filters=FilterConfig(),
        advantages=AdvantageConfig(settings.baseline),
    )
