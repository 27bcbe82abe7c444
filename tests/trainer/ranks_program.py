"""Trains one policy in several ways, alone or as one rank of several.

``python ranks_program.py POLICY OUT VARIANT …``, or the same under torchrun; after ``--launch`` in
two processes. Rank 0 writes ``OUT/VARIANT/weights`` and ``OUT/VARIANT.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.config import (
    ComputeConfig,
    GrpoConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PackingConfig,
    SftConfig,
)
from bridle.trainer.learner.checkpoint import CheckpointError, checkpoints
from bridle.trainer.learner.launch import launch
from bridle.trainer.learner.ranks import follow, learning
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.learner.world import World
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.publish.publisher import default_probes
from bridle.trainer.sft.sft import train_sft

CONFIG = GrpoConfig(
    steps=3,
    minibatches=2,
    epochs=2,
    compute=ComputeConfig(device="cpu"),
    optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1),
    packing=PackingConfig(max_tokens=64, block_tokens=16),
)
_MUON = dataclasses.replace(
    CONFIG, optimizer=OptimizerConfig(name=f"{__file__}:muon", learning_rate=1e-3)
)
SFT = SftConfig(
    epochs=2, batch_size=3, compute=CONFIG.compute, packing=PackingConfig(max_tokens=64)
)


def plain(policy: Path, out: Path) -> dict[str, Any]:
    return _train(policy, out, CONFIG)


def penalty(policy: Path, out: Path) -> dict[str, Any]:
    loss = LossConfig(name="gspo", kl_coefficient=0.1)
    compute = dataclasses.replace(CONFIG.compute, recompute=True)
    return _train(policy, out, dataclasses.replace(CONFIG, loss=loss, compute=compute))


def lora(policy: Path, out: Path) -> dict[str, Any]:
    """Train adapters, with the policy below them as the reference."""
    config = dataclasses.replace(
        CONFIG,
        lora=LoraConfig(rank=2),
        loss=LossConfig(kl_coefficient=0.1),
        packing=PackingConfig(layout="padded", max_tokens=64),
    )
    return _train(policy, out, config)


def muon(named_parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Make the optimizer of the recipe in the documentation."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (recipe,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "Muon" in each)
    made: dict[str, Any] = {}
    exec(recipe, made)  # noqa: S102 - a recipe of this repository
    return made["muon"](named_parameters, **options)


def matrices(policy: Path, out: Path) -> dict[str, Any]:
    """Train two steps with Muon on the hidden matrices."""
    return _train(policy, out, dataclasses.replace(_MUON, steps=2))


def matrices_again(policy: Path, out: Path) -> dict[str, Any]:
    """Go on from the checkpoint of ``matrices`` with a third step."""
    return _train(policy, out.parent / "matrices", _MUON)


def killed(policy: Path, out: Path) -> dict[str, Any]:
    """Do the same as ``plain``; the last rank dies in the second step of the first attempt."""
    world = World.current()
    if world.rank == world.size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":

        def die() -> None:
            while not (out / "killed" / "step-00000001").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    return _train(policy, out, CONFIG)


def fine_tuned(policy: Path, out: Path) -> dict[str, Any]:
    _follow(policy, SFT)
    ids = np.arange(40, dtype=np.uint32)
    examples = [SftExample((ids[: 20 + n] * n) % 64, ids[: 20 + n] > 9) for n in range(1, 8)]
    with learning(policy, SFT) as learner:
        history = train_sft(learner, examples, SFT)
        learner.save(out / "weights")
    return {"losses": [each.loss for each in history]}


def operations(policy: Path, out: Path) -> dict[str, Any]:
    """Report the results of refused and of interrupted operations at rank 0."""
    _follow(policy, CONFIG)
    found: dict[str, Any] = {}
    probes = default_probes(64)
    with learning(policy, CONFIG) as learner:
        before = learner.scores(probes)
        found["scores"] = [each.tolist() for each in before]
        try:
            learner.load_checkpoint(out)
        except CheckpointError as error:
            found["no_checkpoint"] = str(error)
        try:
            learner.save_lora(out / "adapters", policy)
        except UnsupportedCompute as error:
            found["no_adapters"] = str(error)
        (out / "file").touch()
        try:
            learner.save(out / "file" / "below")
        except OSError as error:
            found["not_written"] = type(error).__name__
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        try:
            learner.scores([np.arange(64)] * 400)
            time.sleep(5)
        except KeyboardInterrupt:
            found["interrupted"] = True
        after = learner.scores(probes)
        found["same_after"] = all(map(np.array_equal, before, after))
        if World.current().size > 1:
            try:
                learner.tensors()
            except UnsupportedCompute as error:
                found["tensors"] = str(error)
        learner.save(out / "weights")
    return found


def _train(policy: Path, out: Path, config: GrpoConfig) -> dict[str, Any]:
    _follow(policy, config)
    reports: list[dict[str, Any]] = []
    with learning(policy, config) as learner:
        loop = GrpoLoop(config, [TrainedPolicy(learner, out / out.name)], _collect)
        if checkpoints(out / out.name):
            loop.resume()
        loop.run(lambda report: reports.append(report.metrics()))
        learner.save(out / "weights")
        if config.lora.rank:
            learner.save_lora(out / "adapters", policy)
    return {"steps": reports}


def _follow(policy: Path, config: GrpoConfig | SftConfig) -> None:
    if not World.current().is_first:
        follow(policy, config)


def _collect(step: int, version: int) -> list[Episode]:
    """Sessions of which the packs of a minibatch are an odd number, so that a turn is idle."""
    random = np.random.default_rng(step)
    return [
        _episode(
            f"{group}-{number}",
            f"{step}-{group}",
            float(number % 2),
            random.integers(0, 64, 30).astype(np.uint32),
            random.uniform(-6, -2, 12).astype(np.float32),
            version,
        )
        for group in range(2)
        for number in range(5)
    ]


def _episode(
    session: str, group: str, reward: float, ids: Any, logprobs: Any, version: int
) -> Episode:
    """One branch whose last tokens were sampled."""
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[-len(logprobs) :] = True
    values = np.zeros(len(ids), dtype=np.float32)
    values[mask] = logprobs
    sample = Sample(
        session_id=session,
        leaf_call_id=f"{session}-call",
        kind=CallKind.MAIN,
        role=None,
        token_ids=ids,
        mask=mask,
        logprobs=values,
        versions=np.where(mask, version, -1).astype(np.int64),
        calls=np.where(mask, 0, -1).astype(np.int32),
        call_ids=(f"{session}-call",),
        weight=1.0,
    )
    return Episode(
        session=SessionRecord(id=session, created_at=0.0, group_id=group, outcome="completed"),
        samples=(sample,),
        rewards=(Reward(session, "score", reward, time.time(), source=RewardSource.VERIFIER),),
        conservation=Conservation(
            captured=len(logprobs), trained=len(logprobs), masked={}, dropped={}
        ),
    )


VARIANTS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        *(plain, penalty, lora, matrices, matrices_again),
        *(fine_tuned, operations, killed),
    )
}


def main(arguments: Sequence[str]) -> int:
    torch.set_num_threads(1)
    policy, out, *names = arguments
    for name in names:
        torch.manual_seed(0)
        directory = Path(out) / name
        directory.mkdir(parents=True, exist_ok=True)
        try:
            found = VARIANTS[name](Path(policy), directory)
        except SystemExit:  # a rank that followed
            continue
        (Path(out) / f"{name}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--launch":
        sys.exit(launch(2, main, sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
