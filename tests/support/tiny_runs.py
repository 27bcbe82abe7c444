"""Real training runs of a tiny policy, healthy ones and ones that collapse on purpose.

``python tests/support/tiny_runs.py`` writes their figures to ``tiny_runs.json``, which the tests of
the warnings read. A policy of 40,000 weights writes up to 16 tokens; five tokens end a session,
and seven others a call.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.reconstruct.samples.sample import Conservation, Episode, Sample, Turn
from bridle.store.records import CallKind, CallStatus, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.config import (
    AdvantageConfig,
    CheckpointConfig,
    FilterConfig,
    GrpoConfig,
    OptimizerConfig,
)
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.model import ON_CPU, trainable_policy

RECORDED = Path(__file__).with_suffix(".json")
VOCABULARY, MOST = 32, 16
STOPS, CALLS = range(5), range(5, 12)
FIGURES = ("reward/", "signal/", "judge/", "groups/", "update/entropy", "update/grad_norm")
Pay = Callable[[int, int, Sequence[int]], float | Mapping[str, float]]
"""A session's reward, given the step, the number of its task and its tokens; or several, of which
``judge`` is a rubric's."""


@dataclass(frozen=True)
class TinyRun:
    """The settings of one run."""

    pay: Pay
    seed: int = 0
    rate: float = 5e-3
    steps: int = 40
    tasks: int = 4
    size: int = 8
    most: int = MOST
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)


def even_start(step: int, task: int, tokens: Sequence[int]) -> float:
    return float(tokens[0] % 2 == 0)


def even_share(step: int, task: int, tokens: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def own_token(step: int, task: int, tokens: Sequence[int]) -> float:
    return float(any(token % 8 == 2 + task for token in tokens[:6]))


def mixed(step: int, task: int, tokens: Sequence[int]) -> float:
    own = any(token % 8 == 2 * (task % 4) for token in tokens[:6])
    return (own + even_share(step, task, tokens)) / 2


_NOISE: Final = np.random.default_rng(5)
REPAIRED: Final = 30
"""The step from which on the verifiers of the collapsing runs no longer pay what was hacked."""


def _hacked(hack: Pay) -> Pay:
    def pay(step: int, task: int, tokens: Sequence[int]) -> float | Mapping[str, float]:
        return hack(step, task, tokens) if step < REPAIRED else 0.1 * even_start(step, task, tokens)

    return pay


@_hacked
def length(step: int, task: int, tokens: Sequence[int]) -> float:
    return len(tokens) / MOST


@_hacked
def spam(step: int, task: int, tokens: Sequence[int]) -> float:
    return tokens.count(12) / 40


@_hacked
def silence(step: int, task: int, tokens: Sequence[int]) -> float:
    return len(tokens) / MOST if not set(tokens) & set(CALLS) else 0.0


@_hacked
def coin(step: int, task: int, tokens: Sequence[int]) -> float:
    return float(_NOISE.random() < 0.5)


def flattery(step: int, task: int, tokens: Sequence[int]) -> Mapping[str, float]:
    """The judge likes large tokens, until it is repaired; the verifier does not count."""
    share = sum(token > 20 for token in tokens) / len(tokens)
    right = even_start(step, task, tokens)
    return {"reward": right, "judge": share if step < REPAIRED else 0.1 * right}


def played(run: TinyRun) -> dict[str, dict[int, float]]:
    """Train, and return the figures of the steps by name."""
    torch.manual_seed(run.seed)
    shape = TinyShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64, context=64)
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        policy.mkdir()
        make_policy(policy, shape, vocab_size=VOCABULARY, seed=run.seed)
        optimizer = OptimizerConfig(learning_rate=run.rate, warmup_steps=0)
        config = GrpoConfig(
            steps=run.steps,
            optimizer=optimizer,
            advantages=run.advantages,
            checkpoints=CheckpointConfig(every=1000),
            filters=FilterConfig(drop_zero_variance=True),
        )
        model = trainable_policy(policy, ON_CPU, config.lora)
        learner = Learner(model, config, None)
        trained = TrainedPolicy(learner, Path(folder) / "checkpoints", None)
        loop = GrpoLoop(config, [trained], partial(_collect, run, model))
        steps: dict[str, dict[int, float]] = {}

        def on_step(report: Any) -> None:
            for name, value in report.metrics().items():
                if name.startswith(FIGURES) and np.isfinite(value):
                    steps.setdefault(name, {})[report.step] = float(f"{value:.4g}")

        loop.run(on_step)
    return steps


@torch.no_grad()
def _collect(run: TinyRun, model: Any, step: int, version: int) -> list[Episode]:
    prompts = [[12 + task, 9] for task in range(run.tasks) for _ in range(run.size)]
    made = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), 2, dtype=torch.long),
        do_sample=True,
        top_k=0,
        max_new_tokens=run.most,
        eos_token_id=list(STOPS),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    scores = torch.stack(made.logits, dim=1).log_softmax(-1)
    sampled = made.sequences[:, 2:]
    logprobs = scores.gather(2, sampled[..., None]).squeeze(2).numpy()
    found = []
    for number, tokens in enumerate(sampled.tolist()):
        ends = (at + 1 for at, token in enumerate(tokens) if token in STOPS)
        tokens = tokens[: next(ends, len(tokens))]
        task = number // run.size
        given = run.pay(step, task, tokens)
        sample = _sample(f"{step}-{number}", prompts[number], tokens, logprobs[number], version)
        found.append(_episode(f"{step}-{task}", sample, tokens, given))
    return found


def _sample(name: str, prompt: list[int], tokens: list[int], logprobs: Any, version: int) -> Sample:
    before, size = len(prompt), len(tokens)
    return Sample(
        session_id=name,
        leaf_call_id=name,
        kind=CallKind.MAIN,
        role=None,
        token_ids=np.asarray(prompt + tokens, np.uint32),
        mask=np.asarray([False] * before + [True] * size),
        logprobs=np.asarray([0.0] * before + logprobs[:size].tolist(), np.float32),
        versions=np.asarray([-1] * before + [version] * size),
        calls=np.asarray([-1] * before + [0] * size, np.int32),
        call_ids=(name,),
        weight=1.0,
    )


def _episode(
    group: str, sample: Sample, tokens: list[int], given: float | Mapping[str, float]
) -> Episode:
    name, calls = sample.session_id, 1 + sum(token in CALLS for token in tokens[:-1])
    rewards = given if isinstance(given, Mapping) else {"reward": given}
    return Episode(
        SessionRecord(name, 0.0, group_id=group, outcome="completed"),
        (sample,),
        tuple(_reward(name, one, value) for one, value in rewards.items()),
        Conservation(captured=len(tokens), trained=len(tokens)),
        tuple(Turn(f"{name}/{n}", CallKind.MAIN, CallStatus.COMPLETE) for n in range(calls)),
    )


def _reward(session: str, name: str, value: float) -> Reward:
    if name == "judge":
        detail = {"judges": {"judge": value}, "spread": 0.0}
        return Reward(session, "rubric", value, 0.0, source=RewardSource.SCORER, detail=detail)
    return Reward(session, name, value, 0.0, source=RewardSource.VERIFIER)


HEALTHY: Mapping[str, TinyRun] = {
    f"{pay.__name__}-{seed}": TinyRun(pay, seed, rate, tasks=tasks, size=size)
    for pay in (even_start, even_share, own_token, mixed)
    for seed, rate, tasks, size in (
        (0, 5e-3, 4, 8),
        (1, 2e-3, 4, 8),
        (2, 1e-2, 4, 8),
        (3, 5e-3, 2, 16),
        (4, 5e-3, 8, 4),
    )
}


_BY_JUDGES: Final = AdvantageConfig(reward_weights={"rubric": 1.0})
COLLAPSES: Mapping[str, TinyRun] = {
    "length": TinyRun(length, rate=5e-3, steps=34),
    "spam": TinyRun(spam, rate=1e-2, steps=34, tasks=2, most=40),
    "silence": TinyRun(silence, rate=5e-3, steps=34),
    "coin": TinyRun(coin, rate=3e-2, steps=34),
    "flattery": TinyRun(flattery, rate=1e-2, steps=34, advantages=_BY_JUDGES),
}


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    found = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name, run in {**COLLAPSES, **HEALTHY}.items():
        if not names or name in names:
            found[name] = played(run)
            print(name, [round(v, 2) for v in found[name]["reward/mean"].values()][::5], flush=True)
            RECORDED.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
