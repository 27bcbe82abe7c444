"""Checkpoints from which training goes on exactly as if it had not stopped.

``DIRECTORY/step-00000012/`` holds ``policy/`` (a model directory like any other) and
``trainer.pt`` (adapters, the policy's average if that is its teacher, optimizer, random number
generators, step and version). A checkpoint
appears by one rename after its files have reached the disk, so every visible one is whole.
"""

from __future__ import annotations

import pickle
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from bridle.errors import BridleError
from bridle.trainer.learner.average import Average
from bridle.trainer.learner.optimizer import kind_of
from bridle.trainer.policy.durable import atomic_directory
from bridle.trainer.policy.lora import adapters, load_adapters, scaling
from bridle.trainer.policy.model import checkpoint_tensors, restore_policy, save_policy
from bridle.trainer.policy.sharding import gathered, gathered_state, own_state, share_of

POLICY_DIRECTORY: Final = "policy"
STATE_FILE: Final = "trainer.pt"
_STEP_DIRECTORY = re.compile(r"step-(\d{8})")


class CheckpointError(BridleError):
    """There is no checkpoint to resume from, or it does not fit the model."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training, as a checkpoint keeps it."""

    step: int
    """Number of completed steps."""
    version: int
    """Policy version of the weights."""
    seconds: float = 0.0
    """Seconds that these steps took, over all attempts."""
    groups: Mapping[str, Any] = field(default_factory=dict)
    """The groups that these steps have trained (:mod:`bridle.trainer.collection`)."""
    renumbered: tuple[tuple[int, int], ...] = ()
    """The value of :attr:`bridle.trainer.collection.renumbering.Renumbering.changes`."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """State that estimators keep over the steps
    (:attr:`bridle.trainer.credit.CreditGroup.memory`)."""
    replay: Mapping[str, Any] = field(default_factory=dict)
    """The successes that may be replayed (:mod:`bridle.trainer.collection.replay`)."""
    probe: Mapping[str, Any] = field(default_factory=dict)
    """The first step's probe (:mod:`bridle.trainer.learner.probe`)."""
    fates: Sequence[Any] = ()
    """The fates of the tokens of the steps since the previous checkpoint
    (:mod:`bridle.trainer.batch.fates`)."""


def save_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    *,
    tokenizer_from: Path | None = None,
    keep: int = 2,
    average: Average | None = None,
) -> Path:
    """Write the checkpoint of ``progress.step`` and remove all but the newest ``keep``.

    The checkpoint is the same whether the model is spread or not, and either kind of model can load
    it. With several processes, the first one writes.
    """
    target = directory / f"step-{progress.step:08d}"
    share = share_of(model)
    tensors = checkpoint_tensors(model) if share.processes > 1 else None
    trained = gathered(model, adapters(model))
    state = gathered_state(model, optimizer)
    if not share.is_first:
        return target
    with atomic_directory(target) as scratch:
        save_policy(model, scratch / POLICY_DIRECTORY, tokenizer_from, tensors)
        torch.save(
            {
                "adapters": trained,
                "scaling": scaling(model),
                "average": average.state() if average is not None else {},
                "optimizer": state,
                "optimizer_class": kind_of(optimizer),
                "random": _random_state(),
                "step": progress.step,
                "version": progress.version,
                "seconds": progress.seconds,
                "groups": dict(progress.groups),
                "memory": dict(progress.memory),
                "replay": dict(progress.replay),
                "probe": dict(progress.probe),
                "fates": list(progress.fates),
                "renumbered": [list(change) for change in progress.renumbered],
            },
            scratch / STATE_FILE,
        )
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory``, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _STEP_DIRECTORY.fullmatch(path.name))


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, average: Average | None = None
) -> Progress:
    """Put the checkpoint's weights, optimizer state and random states in place.

    Raises :class:`CheckpointError` if it is not there or does not fit the model.
    """
    if not (path / STATE_FILE).exists():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {STATE_FILE}")
    try:
        state = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
        if adapters(model) or state.get("adapters"):
            if state.get("scaling") != scaling(model):
                raise ValueError("it has other adapters, or they counted otherwise (lora.alpha)")
            load_adapters(model, state["adapters"])
        else:
            restore_policy(model, path / POLICY_DIRECTORY)
        if average is not None:
            average.load(state.get("average", {}))
        saved, own = state.get("optimizer_class", "AdamW"), kind_of(optimizer)
        if saved != own:
            raise ValueError(f"it was trained with {saved}, and optimizer.name makes {own}")
        optimizer.load_state_dict(own_state(model, optimizer, state["optimizer"]))
    except (RuntimeError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error
    _restore_random_state(state["random"])
    return Progress(
        step=state["step"],
        version=state["version"],
        seconds=state.get("seconds", 0.0),
        groups=state.get("groups", {}),
        memory=state.get("memory", {}),
        renumbered=tuple((first, shift) for first, shift in state.get("renumbered", ())),
        replay=state.get("replay", {}),
        probe=state.get("probe", {}),
        fates=tuple(state.get("fates", ())),
    )


def _random_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys)), position, has_gauss, cached],
        "python": random.getstate(),
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy(), position, has_gauss, cached))
    random.setstate(state["python"])
