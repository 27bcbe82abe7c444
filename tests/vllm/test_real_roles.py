"""Two roles of one app, trained as adapters on one vLLM: each as the run that trains it alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.config import (
    AgentConfig,
    FurtherPolicy,
    GroupsConfig,
    PolicyConfig,
    RunConfig,
    TasksConfig,
)
from bridle.run.examples import load_example
from bridle.run.local import train
from bridle.store.reading.queries import Reader
from bridle.store.records import DEFAULT_POLICY
from bridle.trainer.config import (
    AdvantageConfig,
    ComputeConfig,
    GrpoConfig,
    LoraConfig,
    OptimizerConfig,
    PublishConfig,
)
from bridle.trainer.learner.ranks import learning
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.lora import adapters
from bridle.trainer.policy.model import load_policy, save_policy, score_sequence
from bridle.trainer.publish.lora import LoraPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

DIRECTORY, _ = load_example("planner_worker")
WORKER = "worker"
LENGTHS = """
def lengths(delivery):
    places = [place.partition(":") for place in delivery.answer.split("|")]
    return {
        "planner": sum(len(name) for name, _, _ in places) / 10,
        "worker": sum(len(job) for _, _, job in places) / 10,
    }
"""
"""A verifier whose rewards differ within a group whatever a random policy samples."""
TRAINING = GrpoConfig(
    steps=2,
    sinks=(),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    lora=LoraConfig(rank=4, alpha=8),
    compute=ComputeConfig(device="cpu", precision="float32"),
    advantages=AdvantageConfig(baseline="per_role"),
    publish=PublishConfig(through="lora"),
)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    made = [sys.executable, str(DIRECTORY / "tasks.py")]
    lines = subprocess.run(made, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = [turn["content"] for line in lines for turn in json.loads(line)["messages"]]
    policy = tmp_path / "policy"
    size = train_tokenizer(policy, texts, vocab_size=512)
    shape = TinyShape(hidden=64, layers=2, heads=2, kv_heads=2, intermediate=128, context=512)
    make_policy(policy, shape, vocab_size=size, seed=3)
    return policy


class Watched(LoraPublisher):
    """A publisher that notes what the engine scores for each adapter, at each publish."""

    scored: dict[tuple[str, int], Any]
    names: dict[str, str]

    def publish(self, policy: Any, version: int) -> Any:
        own = self._first.name
        others = {name: served for name, served in self.names.items() if name != own}
        before = {name: self.scores(served) for name, served in others.items()}
        record = super().publish(policy, version)
        for name, served in others.items():
            assert np.array_equal(before[name], self.scores(served)), "it moved the other's scores"
        self.names[own] = self.served[-1][0]
        self.scored[own, version] = self.scores(self.names[own])
        return record

    def scores(self, served: str) -> Any:
        probes = [self.engine.score(probe.tolist(), model=served) for probe in self._probes]
        return np.concatenate(probes)


class Collecting(GrpoLoop):
    """A loop that keeps the sessions of its steps."""

    steps: list[Any]

    def __init__(self, config: Any, policies: Any, collect: Any, **more: Any) -> None:
        def keeping(step: int, version: int) -> Any:
            self.steps.append(collect(step, version))
            return self.steps[-1]

        super().__init__(config, policies, keeping, **more)


def alone(name: str, begun: Path, sessions: list[Any], place: Path) -> dict[tuple[str, int], Any]:
    """Train one policy on the same sessions, and save each version merged, as a run of one does.

    Return the merged versions' scores of the probes. The adapters of the last are compared with
    those in ``place``'s checkpoint, bit for bit.
    """
    found = {}
    from bridle.trainer.publish.publisher import default_probes

    with learning(begun, TRAINING) as learner:

        def publish(policy: Any, version: int) -> None:
            merged = place / f"merged-{name}-{version}"
            save_policy(policy.model, merged)
            model = load_policy(merged)
            with torch.no_grad():
                probes = default_probes(learner.vocabulary)
                found[name, version] = np.concatenate(
                    [score_sequence(model, probe).numpy() for probe in probes]
                )

        trained = TrainedPolicy(learner, place / f"alone-{name}", publish, begun, name)
        GrpoLoop(TRAINING, [trained], lambda step, _version: sessions[step]).run()
        step = f"checkpoints/step-{TRAINING.steps:08d}/trainer.pt"
        where = place / "out" / (step if name == DEFAULT_POLICY else f"policies/{name}/{step}")
        kept = torch.load(where, weights_only=True)["adapters"]
        own = {key: each.detach() for key, each in adapters(learner.model).items()}
        torch.testing.assert_close(kept, own, rtol=0, atol=0)
    return found


@pytest.mark.sampled(0)
def test_each_role_on_one_vllm_equals_the_run_that_trains_it_alone(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = tmp_path / "lengths.py"
    lengths.write_text(LENGTHS)
    Watched.scored, Watched.names, Collecting.steps = {}, {}, []
    monkeypatch.setattr("bridle.run.publishing.LoraPublisher", Watched)
    monkeypatch.setattr("bridle.run.training.GrpoLoop", Collecting)
    config = RunConfig(
        tasks=TasksConfig(f"{DIRECTORY / 'tasks.py'}:train", f"{lengths}:lengths"),
        agent=AgentConfig(str(DIRECTORY / "agent.py"), unsafe_sandbox=True, parallel=4),
        policy=PolicyConfig(str(begun), "vllm", ("--set=cpu_kv_cache_gib=1",)),
        groups=GroupsConfig(per_step=2, size=4),
        policies={WORKER: FurtherPolicy()},
        training=TRAINING,
    )
    result = train(config, tmp_path / "out")
    assert result.steps == TRAINING.steps

    versions = range(TRAINING.steps + 1)
    assert set(Watched.scored) == {(n, v) for n in (DEFAULT_POLICY, WORKER) for v in versions}
    for name in (DEFAULT_POLICY, WORKER):
        expected = alone(name, begun, Collecting.steps, tmp_path)
        assert len(expected) == TRAINING.steps
        for key, scores in expected.items():
            gap = np.abs(Watched.scored[key] - scores).mean()
            moved = np.abs(Watched.scored[key] - Watched.scored[name, 0]).mean()
            print(f"{key}: engine and merged {gap:.1e}, moved {moved:.1e}", file=sys.stderr)
            assert gap <= 1e-4 < moved
    last = TRAINING.steps
    apart = Watched.scored[DEFAULT_POLICY, last] - Watched.scored[WORKER, last]
    assert np.abs(apart).mean() > 1e-3

    with Reader(result.store) as reader:
        (run,) = reader.runs("train")
        published = {(one.name, one.version) for one in reader.policies(run.id) if one.verified}
        calls = [
            call for session in reader.sessions(run=run.id) for call in reader.calls(session.id)
        ]
    assert published >= set(Watched.scored)
    asked = {(call.role, call.policy, call.version_start) for call in calls}
    assert asked == {("planner", None, 0), ("planner", None, 1)} | {
        (WORKER, WORKER, version) for version in (0, 1)
    }
    for call in calls:
        served = f"{call.policy or DEFAULT_POLICY}-v{call.version_start:08d}-"
        assert str(call.model_served).startswith(served), "by the adapter of its role and version"
    assert len(list((tmp_path / "out" / "logs").rglob("vllm.log"))) == 1
