"""A policy that is trained by several processes of this machine, each with a device.

This process keeps no weights. It tells all of them the same at the same time, over a pipe each, and
they compute together (:mod:`bridle.trainer.policy.sharding`). So whatever interrupts this process,
they finish what they were told, and stay of one mind; when this process is gone, so are they.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bridle.errors import BridleError
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig, PackingConfig, SftConfig
from bridle.trainer.learner.checkpoint import Progress
from bridle.trainer.learner.learner import AnyLearner, Learner
from bridle.trainer.learner.update import UpdateStats
from bridle.trainer.policy.compute import UnsupportedCompute, choose_devices
from bridle.trainer.policy.model import load_policy, trainable_policy
from bridle.trainer.policy.weights import Probes, Scores
from bridle.trainer.sft.data import SftExample
from bridle.trainer.sft.update import SftUpdate

Settings = GrpoConfig | SftConfig

LOOPBACK: Final = "lo"
"""Linux's name of the interface through which they find each other; nobody else reaches it."""
OTHERS_FINISH_S: Final = 10.0
"""How long processes may go on after one has failed: they wait for it in vain, or are done soon."""
LEAVE_S: Final = 10.0
"""How long they may take to leave."""
STALL: Final = timedelta(minutes=30)
"""Longest that one process waits for another within a pass."""


class LearnerFailed(BridleError):
    """A process of the group is gone; the others were ended."""

    retryable = True


@contextmanager
def learning(policy: Path, config: Settings) -> Iterator[AnyLearner]:
    """Whoever trains ``policy``: this process, or one for each device that ``config`` names.

    Raises :class:`bridle.trainer.policy.model.UnsupportedModel`, and :class:`UnsupportedCompute`
    also when its memory does not suffice in the end.
    """
    devices = choose_devices(config.compute.device)
    try:
        if len(devices) == 1:
            yield _load(policy, config).learner()
            return
        with LearnerGroup(policy, config, devices) as group:
            yield group
    except torch.OutOfMemoryError as error:
        raise UnsupportedCompute(
            f"{str(error).splitlines()[0]} Less is needed with --recompute, --lora-rank, more "
            "devices, or a smaller max_tokens in [packing]"
        ) from error


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A policy, or this process's part of it, and what it is trained with."""

    config: Settings
    model: nn.Module
    reference: nn.Module | None

    def learner(self) -> Learner:
        return Learner(self.model, self.config, self.reference)


def _load(policy: Path, config: Settings, mesh: DeviceMesh | None = None) -> _Loaded:
    model = trainable_policy(policy, config.compute, config.lora, config.seed, mesh)
    reference = None
    if _needs_reference(config):
        frozen = replace(config.compute, recompute=False)
        reference = load_policy(policy, compute=frozen, mesh=mesh).requires_grad_(False)
    return _Loaded(config, model, reference)


def _needs_reference(config: Settings) -> bool:
    """Whether there is a KL penalty, which holds on to the policy as it was at the beginning."""
    return isinstance(config, GrpoConfig) and config.loss.kl_coefficient != 0


class LearnerGroup:
    """Trains ``policy`` as ``config`` says in a process for each of ``devices``; a context manager.

    Operations are those of :class:`bridle.trainer.learner.learner.AnyLearner` and raise what those
    raise, or :class:`LearnerFailed` when a process dies; then all of them are ended. One at a time
    computes.
    """

    def __init__(self, policy: Path, config: Settings, devices: Sequence[torch.device]) -> None:
        self._policy = policy
        self._config = config
        self._devices = devices
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._owing: set[int] = set()
        """Those whose answer to something earlier was not waited for."""
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._meeting = tempfile.TemporaryDirectory()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self) -> None:
        # Forked from a process that has imported this module, and with it torch, once; none of the
        # imports starts a thread or asks for a device.
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload([__name__])
        for rank, device in enumerate(self._devices):
            ours, theirs = forking.Pipe()
            store = Path(self._meeting.name) / "store"
            seat = _Seat(rank, len(self._devices), str(device), store)
            process = forking.Process(
                target=_serve, args=(seat, self._policy, self._config, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._ask("join")
        # One after another: each reads the whole policy before it keeps its part.
        for rank in range(len(self._devices)):
            self._ask("load", only=rank)
        self.has_reference = _needs_reference(self._config)
        self.packing, self.vocabulary, self.is_rounded = self._ask("begin")[0]

    def update(
        self,
        items: Sequence[TrainItem],
        config: GrpoConfig,
        *,
        step: int,
        version: int,
        learning_rate: float,
    ) -> UpdateStats:
        told: dict[str, Any] = {"step": step, "version": version, "learning_rate": learning_rate}
        return UpdateStats.of_processes(self._ask("update", items, config, **told))

    def fit(
        self, batch: Sequence[SftExample], config: SftConfig, *, learning_rate: float
    ) -> SftUpdate:
        return SftUpdate.of_processes(self._ask("fit", batch, config, learning_rate=learning_rate))

    def scores(self, probes: Probes) -> Scores:
        scores: Scores = self._ask("scores", probes)[0]
        return scores

    def save(
        self,
        directory: Path,
        tokenizer_from: Path | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        if tensors is not None:
            raise UnsupportedCompute("of a policy that is spread only its own weights are written")
        self._ask("save", directory, tokenizer_from)

    def tensors(self) -> dict[str, Tensor]:
        raise UnsupportedCompute("a policy that is spread is published through directories")

    def save_checkpoint(
        self, directory: Path, progress: Progress, *, tokenizer_from: Path | None, keep: int
    ) -> None:
        self._ask("save_checkpoint", directory, progress, tokenizer_from=tokenizer_from, keep=keep)

    def load_checkpoint(self, path: Path) -> Progress:
        progress: Progress = self._ask("load_checkpoint", path)[0]
        return progress

    def _ask(self, what: str, *arguments: Any, only: int | None = None, **named: Any) -> list[Any]:
        """What every process answers, or ``only`` one."""
        with self._lock:
            if self._failure is not None:
                raise LearnerFailed(self._failure)
            self._answers(set(self._owing))
            asked = set(range(len(self._pipes))) if only is None else {only}
            self._tell(asked, (what, arguments, named))
            answers = self._answers(asked)
            for rank in sorted(answers):
                if isinstance(answers[rank], _Raised):
                    raise answers[rank].error
            return [answers[rank] for rank in sorted(answers)]

    def _tell(self, ranks: set[int], message: object) -> None:
        """All of ``ranks``, or none: those that were told would wait for the others."""
        try:
            for rank in ranks:
                with contextlib.suppress(BrokenPipeError):  # its death is found out by its silence
                    self._pipes[rank].send(message)
            self._owing |= ranks
        except BaseException:
            self._failure = "the processes that train were ended: not all were told what to do"
            self._end()
            raise

    def _answers(self, ranks: set[int]) -> dict[int, Any]:
        """One answer of each of ``ranks``; raises what made all of them end."""
        answers: dict[int, Any] = {}
        failed = False
        while missing := ranks - answers.keys():
            by_pipe = {self._pipes[rank]: rank for rank in missing}
            ready = wait(list(by_pipe), OTHERS_FINISH_S if failed else None)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)  # noqa: S101 - as given
                rank = by_pipe[pipe]
                try:
                    answers[rank] = pipe.recv()
                    self._owing.discard(rank)
                except (EOFError, OSError):
                    answers[rank] = _Raised(LearnerFailed(self._obituary(rank)))
                    self._failure = self._obituary(rank)
                failed = failed or isinstance(answers[rank], _Raised)
        if missing or self._failure:
            raised = [each.error for each in answers.values() if isinstance(each, _Raised)]
            # Of those that waited for one that died, each has an error, too.
            deaths = [each for each in raised if isinstance(each, LearnerFailed)]
            first = (deaths or raised)[0]
            self._failure = self._failure or f"the processes that train were ended: {first}"
            self._end()
            raise first
        return answers

    def _obituary(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(1.0)
        ended = process.exitcode
        how = f"by signal {-ended}" if ended is not None and ended < 0 else f"with {ended}"
        return f"the process that trains on {self._devices[rank]} ended {how}"

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0 if self._failure else LEAVE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._meeting.cleanup()


@dataclass(frozen=True, slots=True)
class _Raised:
    """The answer of a process that could not do as told."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class _Seat:
    """A process's place in its group."""

    rank: int
    processes: int
    device: str
    store: Path
    """A file through which they find each other."""


def _serve(seat: _Seat, policy: Path, config: Settings, pipe: Connection) -> None:
    """Does as it is told until nobody is left to tell it anything."""
    # Ctrl-C reaches all processes of a terminal: it is for the one that tells these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    if seat.rank:
        # All would say the same.
        logging.disable(logging.WARNING)
    compute = replace(config.compute, device=seat.device)
    member = _Member(seat, policy, replace(config, compute=compute))
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, arguments, named = pipe.recv()
            try:
                answer = member.do(what, *arguments, **named)
            except Exception as error:  # noqa: BLE001 - the one that told it hears of it
                answer = _Raised(_portable(error))
            pipe.send(answer)
    # Threads of a collective that waits for those who are gone would hold the process.
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """``error``, or one in its place that can be sent."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever its class needs that is not sent
        return LearnerFailed(f"{type(error).__name__}: {error}")
    return error


class _Member:
    """A process of the group, before and after it has its part of the policy."""

    def __init__(self, seat: _Seat, policy: Path, config: Settings) -> None:
        self._seat = seat
        self._policy = policy
        self._config = config

    def do(self, what: str, *arguments: Any, **named: Any) -> Any:
        doer = self if what in ("join", "load", "begin") else self._learner
        return getattr(doer, what)(*arguments, **named)

    def join(self) -> None:
        device = torch.device(self._seat.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            store=FileStore(str(self._seat.store), self._seat.processes),
            rank=self._seat.rank,
            world_size=self._seat.processes,
            timeout=STALL,
        )
        self._mesh = init_device_mesh(device.type, (self._seat.processes,))

    def load(self) -> None:
        self._loaded = _load(self._policy, self._config, self._mesh)

    def begin(self) -> tuple[PackingConfig, int, bool]:
        self._learner = self._loaded.learner()
        return self._learner.packing, self._learner.vocabulary, self._learner.is_rounded
