"""A policy that several processes train together, one for each device: SPMD under torchrun.

Rank 0 runs the training run: it collects sessions, reads the store and writes files. It broadcasts
each operation on the policy (an update, scores, a checkpoint), and every rank executes it on its
part (:mod:`bridle.trainer.policy.sharding`). One process is the same code with one rank.

A rank that fails ends its process. torchrun then ends the others and starts all of them again, and
rank 0 resumes from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bridle.errors import BridleError
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig, SftConfig
from bridle.trainer.learner.checkpoint import Progress
from bridle.trainer.learner.learner import AnyLearner, Learner
from bridle.trainer.learner.sft_update import SftExample, SftUpdate
from bridle.trainer.learner.update import UpdateStats
from bridle.trainer.learner.world import World, join
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.policy.model import load_policy, trainable_policy
from bridle.trainer.policy.weights import Probes, Scores

Settings = GrpoConfig | SftConfig

_SUMMED: Final = ("update", "fit")
"""Operations of which each rank returns a part."""


@contextmanager
def learning(policy: Path, config: Settings) -> Iterator[AnyLearner]:
    """Yield the learner that trains ``policy`` as ``config`` says, in this process or in all ranks.

    Under torchrun, only rank 0 enters this context; the others call :func:`follow`. Raises
    :class:`bridle.trainer.policy.model.UnsupportedModel`, and :class:`UnsupportedCompute`, also if
    memory runs out later.
    """
    world = World.current()
    config = _on_own_device(world, config)
    try:
        if world.size == 1:
            model, reference = _load(policy, config)
            yield Learner(model, config, reference)
            return
        spread = SpreadLearner(*_connected(world, policy, config))
        try:
            yield spread
        finally:
            spread.end()
    except torch.OutOfMemoryError as error:
        raise UnsupportedCompute(
            f"{str(error).splitlines()[0]} Less is needed with compute.recompute, lora.rank, more "
            "devices, or a smaller packing.max_tokens"
        ) from error


def follow(policy: Path, config: Settings) -> NoReturn:
    """Execute rank 0's operations in this other rank, and exit when the run of rank 0 is over.

    ``policy`` and ``config`` must be those with which rank 0 enters :func:`learning`.
    """
    world = World.current()
    # Ctrl-C and SIGTERM reach every process. Rank 0 acts on them between operations.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # rank 0 logs the same
    learner, control = _connected(world, policy, _on_own_device(world, config))
    while (operation := _next(control)) is not None:
        _execute(learner, operation, control)
    sys.exit(0)


@dataclass(frozen=True, slots=True)
class _Operation:
    """A method of :class:`Learner` that every rank calls."""

    name: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Failed:
    """The outcome of an operation that a rank refused."""

    error: Exception


class SpreadLearner:
    """Rank 0's view of the policy that all ranks train; an :class:`AnyLearner`."""

    def __init__(self, own: Learner, control: dist.ProcessGroup) -> None:
        self.packing = own.packing
        self.average = own.average
        self.has_reference = own.has_reference
        self.vocabulary = own.vocabulary
        self.is_rounded = own.is_rounded
        self._own = own
        self._control = control
        self._lock = threading.Lock()

    def update(
        self,
        items: Sequence[TrainItem],
        config: GrpoConfig,
        *,
        step: int,
        version: int,
        learning_rate: float,
        entropy_bonus: float = 0.0,
    ) -> UpdateStats:
        places: dict[str, Any] = {"step": step, "version": version, "learning_rate": learning_rate}
        places["entropy_bonus"] = entropy_bonus
        return UpdateStats.of_processes(self._everywhere("update", items, config, **places))

    def fit(
        self, batch: Sequence[SftExample], config: SftConfig, *, learning_rate: float
    ) -> SftUpdate:
        parts = self._everywhere("fit", batch, config, learning_rate=learning_rate)
        return SftUpdate.of_processes(parts)

    def scores(self, probes: Probes) -> Scores:
        scores: Scores = self._everywhere("scores", probes)[0]
        return scores

    def save(
        self,
        directory: Path,
        tokenizer_from: Path | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        types_from: Path | None = None,
    ) -> None:
        if tensors is not None:
            raise UnsupportedCompute("of a policy that is spread only its own weights are written")
        self._everywhere("save", directory, tokenizer_from, types_from=types_from)

    def save_lora(self, directory: Path, base: Path) -> None:
        self._everywhere("save_lora", directory, base)

    def tensors(self) -> dict[str, Tensor]:
        raise UnsupportedCompute("a policy that is spread is published through directories")

    def save_checkpoint(
        self, directory: Path, progress: Progress, *, tokenizer_from: Path | None, keep: int
    ) -> None:
        self._everywhere(
            "save_checkpoint", directory, progress, tokenizer_from=tokenizer_from, keep=keep
        )

    def load_checkpoint(self, path: Path) -> Progress:
        progress: Progress = self._everywhere("load_checkpoint", path)[0]
        return progress

    def end(self) -> None:
        """End the other ranks, without waiting for those that are gone already."""
        with self._lock, contextlib.suppress(RuntimeError):
            _broadcast(None, self._control)

    def _everywhere(self, name: str, *arguments: Any, **named: Any) -> list[Any]:
        """Execute an operation in every rank and return the outcomes.

        Raise rank 0's error, or else another's.
        """
        operation = _Operation(name, arguments, named)
        with self._lock, _uninterrupted():
            _broadcast(operation, self._control)
            outcomes = _execute(self._own, operation, self._control)
        for outcome in outcomes:
            if isinstance(outcome, _Failed):
                raise outcome.error
        return outcomes


def _connected(world: World, policy: Path, config: Settings) -> tuple[Learner, dist.ProcessGroup]:
    """Return this rank's part of the policy and the group for operations.

    Every rank has its own part by then.
    """
    device = torch.device(config.compute.device)
    control = join(world, device)
    mesh = init_device_mesh(device.type, (world.size,))
    # In turn on each machine: a rank reads the whole policy before it keeps its part.
    for turn in range(world.local_size):
        if turn == world.local_rank:
            model, reference = _load(policy, config, mesh)
        dist.barrier(control)
    return Learner(model, config, reference), control


def _load(
    policy: Path, config: Settings, mesh: DeviceMesh | None = None
) -> tuple[nn.Module, nn.Module | None]:
    model = trainable_policy(policy, config.compute, config.lora, config.seed, mesh)
    if not isinstance(config, GrpoConfig) or config.loss.kl_coefficient == 0:
        return model, None
    # The policy as it was at the beginning, which the KL penalty is measured to.
    if config.lora.rank:
        return model, model  # below its adapters it stays as it was
    frozen = replace(config.compute, recompute=False)
    return model, load_policy(policy, compute=frozen, mesh=mesh).requires_grad_(False)


def _on_own_device(world: World, config: Settings) -> Settings:
    device = str(world.device(config.compute.device))
    return replace(config, compute=replace(config.compute, device=device))


def _broadcast(operation: _Operation | None, control: dist.ProcessGroup) -> _Operation | None:
    """Return rank 0's ``operation`` in every rank."""
    message = [operation]
    dist.broadcast_object_list(message, src=0, group=control)
    return message[0]


def _next(control: dist.ProcessGroup) -> _Operation | None:
    """Return the operation to execute, or ``None`` once rank 0 has ended, in order or not."""
    try:
        return _broadcast(None, control)
    except RuntimeError:  # the connection is closed: torchrun knows how rank 0 ended
        return None


def _execute(learner: Learner, operation: _Operation, control: dist.ProcessGroup) -> list[Any]:
    """Execute ``operation`` in this rank.

    Return each rank's outcome in rank 0 and nothing in others.

    Errors that a user can act on are outcomes: every rank raises them alike, or rank 0 alone after
    the last exchange. Any other error ends this process.
    """
    outcome: Any
    try:
        outcome = getattr(learner, operation.name)(*operation.arguments, **operation.named)
    except (BridleError, OSError) as error:
        outcome = _Failed(error)
    sent = None  # what the others return of most operations is what rank 0 returns
    if dist.get_rank(control):
        if isinstance(outcome, _Failed):
            sent = _Failed(BridleError(str(outcome.error)))  # its own class may not be portable
        elif operation.name in _SUMMED:
            sent = outcome
        dist.gather_object(sent, dst=0, group=control)
        return []
    outcomes: list[Any] = [None] * dist.get_world_size(control)
    dist.gather_object(sent, outcomes, dst=0, group=control)
    return [outcome, *outcomes[1:]]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the operation is over, because the other ranks do not stop for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
