"""The embedded engine's thread. Only it uses the model; the event loop sends it work by a queue."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from bridle.engine.contract.contract import ModelCard, PauseMode
from bridle.engine.contract.errors import RequestRefused
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.embedded.model import PackedModel, WeightsMismatch, load_state
from bridle.engine.embedded.scheduler import Generation, Scheduler, SchedulerLimits, StepOutcome
from bridle.engine.serve.backend import Prompt, SamplingParams, Step

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    device: str = "cpu"
    dtype: str = "float32"
    """``float32``, ``bfloat16`` or ``float16``."""
    threads: int = 1
    """Torch threads of the engine's thread. One is best for small models, and wherever the cores
    are shared with agents and a trainer: idle torch threads spin."""
    max_model_len: int | None = None
    """Maximum tokens of prompt and reply together; by default the length that the model was made
    for."""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)


class _Reader:
    """The event loop's end of one sequence."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._step = Step()
        self._news = asyncio.Event()

    def deliver(self, outcome: StepOutcome) -> None:
        """Take an outcome, on the event loop.

        Outcomes that the reader has not taken yet are one step.
        """
        if outcome.token is not None:
            self._step.tokens.append(outcome.token)
        if outcome.experts is not None:
            self._step.experts.append(outcome.experts)
        self._step.finish = outcome.finish
        self._step.stop_token = outcome.stop_token
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def step(self) -> Step:
        """Return the outcomes since the last call; wait if there are none."""
        await self._news.wait()
        self._news.clear()
        step, self._step = self._step, Step()
        return step


class EmbeddedBackend:
    """A backend for the Transformers causal LM in ``model_dir``.

    Start it before use, and stop it after.
    """

    samples = True

    def __init__(
        self,
        model_dir: str | Path,
        *,
        served_model_name: str | None = None,
        settings: EmbeddedSettings | None = None,
    ) -> None:
        self.settings = settings or EmbeddedSettings()
        self.tokenizer = Tokenizer(model_dir)
        self._directory = Path(model_dir)
        self._name = served_model_name or self._directory.name
        self._dtype: torch.dtype = getattr(torch, self.settings.dtype)
        self._readers: dict[Generation, _Reader] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._stopping = False
        self._failure: BaseException | None = None
        self._gate = _Gate()
        self._thread = threading.Thread(target=self._run, name="engine-model", daemon=True)

    def start(self) -> None:
        """Load the model and begin to serve. Return when it is ready."""
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)
        self._thread.join()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self._failure is None

    @property
    def policy_version(self) -> int:
        return self.scheduler.version

    @property
    def weights_fingerprint(self) -> str:
        return self._weights_fingerprint

    @property
    def paused(self) -> bool:
        return self._gate.closed

    async def generate(self, prompt: Prompt, sampling: SamplingParams) -> AsyncGenerator[Step]:
        self._check_alive()
        kind = (prompt.response_format or {}).get("type", "text")
        if kind != "text":
            raise RequestRefused(
                f"response_format {kind} is not supported: this engine does not constrain what "
                "the model says. Serve the model with vLLM for that.",
                param="response_format",
            )
        reader = _Reader()
        generation = Generation(prompt, sampling)
        self._inbox.put(lambda: self._admit(generation, reader))
        return self._steps(generation, reader)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        done: Future[None] = Future()
        self._inbox.put(lambda: self._pause(mode, clear_cache, done))
        await asyncio.wrap_future(done)

    async def resume(self) -> None:
        await self._on_engine(self._resume)

    async def reload_weights(self, directory: str) -> None:
        try:
            state = await asyncio.to_thread(load_state, directory, self._dtype)
            await self._on_engine(lambda: self._load(state))
        except WeightsMismatch as error:
            raise RequestRefused(str(error), param="weights_path") from error

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> int:
        """Serve ``state`` (by the model's own names) from the next step on.

        It is for callers in the same process, but not on the event loop.

        Return the new policy version. Raise :class:`WeightsMismatch` if the weights do not fit.
        """
        done: Future[None] = Future()
        self._inbox.put(_settling(done, lambda: self._load(state)))
        done.result()
        return self.policy_version

    async def reset_prefix_cache(self) -> None:
        await self._on_engine(self.scheduler.cache.clear)

    async def _steps(self, generation: Generation, reader: _Reader) -> AsyncGenerator[Step]:
        finished = first = False
        try:
            while not finished:
                step = await reader.step()
                if self._failure is not None and step.finish is None:
                    self._check_alive()
                if not first:
                    first = True
                    step.cached_tokens = generation.cached_tokens
                    step.prompt_logprobs = generation.scores
                finished = step.finish is not None
                yield step
        finally:
            if not finished:
                self._inbox.put(lambda: self._forget(generation))

    def _check_alive(self) -> None:
        if not self.healthy:
            raise RequestRefused(
                f"The engine has stopped: {self._failure!r}",
                status=500,
                kind="InternalServerError",
            )

    async def _on_engine(self, work: Callable[[], _Result]) -> _Result:
        done: Future[_Result] = Future()
        self._inbox.put(_settling(done, work))
        return await asyncio.wrap_future(done)

    # From here on, everything runs on the engine's thread.

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        try:
            self._load_model()
        except BaseException as error:
            self._started.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        self._started.set_result(None)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
        except BaseException as error:
            self._failure = error
            logger.exception("the engine's thread has died")
            raise
        finally:
            self._wake_everyone()

    def _load_model(self) -> None:
        model = PackedModel(self._directory, device=self.settings.device, dtype=self._dtype)
        length = self.settings.max_model_len or model.context
        if length is None:
            raise ValueError(f"{self._directory} does not tell its context: set max_model_len")
        self._weights_fingerprint = model.digest()
        self.vocab_size = model.vocab_size
        self.card = ModelCard(self._name, length, str(self._directory))
        self.scheduler = Scheduler(model, self.tokenizer.eos_token_ids, self.settings.limits)

    def _turn(self) -> None:
        """Do the work that the event loop has queued, then one step.

        Sleep if there is nothing to do.
        """
        works = self.scheduler.busy and not self._gate.frozen
        try:
            while True:
                task = self._inbox.get(block=not works)
                works = True
                task()
        except queue.Empty:
            pass
        if self._stopping or self._gate.frozen:
            return
        self._deliver(self.scheduler.step())
        if not self.scheduler.busy:
            self._gate.drained()

    def _admit(self, generation: Generation, reader: _Reader) -> None:
        self._readers[generation] = reader
        if self._gate.closed:
            self._gate.held.append(generation)
        else:
            self.scheduler.add(generation)

    def _forget(self, generation: Generation) -> None:
        if self._readers.pop(generation, None) is None:
            return
        if generation in self._gate.held:
            self._gate.held.remove(generation)
        else:
            self.scheduler.remove(generation)
        if not self.scheduler.busy:
            self._gate.drained()

    def _pause(self, mode: PauseMode, clear_cache: bool, done: Future[None]) -> None:
        self._gate.close(mode, done)
        if mode == "abort":
            self._deliver(self.scheduler.abort_all())
        if clear_cache and mode != "keep":
            # What running sequences leave behind is cleared when the last has ended.
            self._gate.on_drained(self.scheduler.cache.clear)
        if not self.scheduler.busy:
            self._gate.drained()

    def _resume(self) -> None:
        for generation in self._gate.open():
            self.scheduler.add(generation)

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.scheduler.model.load_weights(state)
        self._weights_fingerprint = self.scheduler.model.digest()
        self.scheduler.new_version()

    def _deliver(self, outcomes: list[StepOutcome]) -> None:
        """Send a step's outcomes to the event loop, all in one call."""
        posts: list[tuple[_Reader, StepOutcome]] = []
        for outcome in outcomes:
            found = self._readers.get(outcome.sequence)
            if found is None:
                continue
            posts.append((found, outcome))
            if outcome.finish is not None:
                del self._readers[outcome.sequence]
        for loop in {reader.loop for reader, _ in posts}:
            loop.call_soon_threadsafe(_post, [each for each in posts if each[0].loop is loop])

    def _wake_everyone(self) -> None:
        for reader in self._readers.values():
            if not reader.loop.is_closed():
                reader.loop.call_soon_threadsafe(reader.wake)


class _Gate:
    """The switch that decides whether sequences may start and steps may run.

    Only the engine's thread changes it.
    """

    def __init__(self) -> None:
        self.closed = False
        """True if new sequences are held back."""
        self.frozen = False
        """True if no step runs, so that running sequences stay as they are."""
        self.held: list[Generation] = []
        self._waiters: list[Future[None]] = []
        self._when_drained: list[Callable[[], None]] = []

    def close(self, mode: PauseMode, done: Future[None]) -> None:
        self.closed = True
        self.frozen = mode == "keep"
        self._waiters.append(done)
        if self.frozen:
            self._let_go()

    def on_drained(self, action: Callable[[], None]) -> None:
        self._when_drained.append(action)

    def drained(self) -> None:
        """Run the deferred actions and answer pauses, because nothing runs any more."""
        for action in self._when_drained:
            action()
        self._when_drained.clear()
        self._let_go()

    def open(self) -> list[Generation]:
        """End the pause and return the sequences that were held back."""
        self.closed = self.frozen = False
        self.drained()
        held, self.held = self.held, []
        return held

    def _let_go(self) -> None:
        """Answer all waiting requests for a pause that were not cancelled."""
        for waiter in self._waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
        self._waiters.clear()


def _post(posts: list[tuple[_Reader, StepOutcome]]) -> None:
    for reader, outcome in posts:
        reader.deliver(outcome)


def _settling(done: Future[_Result], work: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls ``work`` and settles ``done`` with its result or exception."""

    def settle() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
            if not isinstance(error, Exception):
                raise

    return settle
