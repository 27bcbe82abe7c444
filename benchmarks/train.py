"""A benchmark of a training step by the layout of its samples: trees against padded rows.

Samples are made by rule; the trainer's own update trains on them, from packing to the optimizer's
step. A speedup is the time of the step in padded rows, divided by its time in trees, for the same
samples, the same policy and the same budget of tokens per pack.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bridle.recipes.models.tiny import TinyShape, make_hybrid_policy, make_policy
from bridle.reconstruct.samples.sample import Sample
from bridle.store.records import CallKind
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import (
    ComputeConfig,
    GrpoConfig,
    Layout,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PackingConfig,
    Precision,
)
from bridle.trainer.learner.update import UpdateStats, update_policy
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.model import trainable_policy

VOCABULARY: Final = 512
"""The smallest vocabulary; samples have ids of it alone."""
CONTEXT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """The shape of a policy and the size of its vocabulary."""

    model: TinyShape
    vocabulary: int = VOCABULARY

    @property
    def hybrid(self) -> TinyShape:
        """The shape of the hybrid policy.

        It has three layers of Gated DeltaNet for each layer of attention, as in Qwen3.5.
        """
        return replace(self.model, layers=max(4, self.model.layers))


SHAPES: Final[Mapping[str, PolicyShape]] = {
    "tiny": PolicyShape(
        TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, context=CONTEXT)
    ),
    "300m": PolicyShape(
        TinyShape(hidden=2048, layers=8, heads=16, kv_heads=8, intermediate=4096, context=CONTEXT)
    ),
    "4b": PolicyShape(
        TinyShape(
            hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728, context=CONTEXT,
            rope_theta=1e6, head_size=128,
        ),
        vocabulary=151_936,
    ),
}  # fmt: skip
"""Policies of random weights by name; ``4b`` has the shape of Qwen3-4B."""
ENOUGH_S: Final = 10.0
"""Seconds of measurement after which a step is not timed again; it is timed at most three times."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The sizes of the batches, in tokens unless stated otherwise."""

    turns: int = 30
    question: int = 400
    thinking: int = 100
    """Thinking tokens of a turn; the next turn's prompt does not have them."""
    answer: int = 50
    result: int = 150
    """Tokens of the result of the tool that a turn called."""
    sessions: int = 64
    """Number of sessions that share a prompt."""
    prompt: int = 6_000
    tail: int = 300
    lines: int = 32
    """Number of sessions that share nothing."""
    line: int = 1_000
    """The median length of those sessions, in tokens; the lengths are lognormal (σ = 0.3)."""
    max_tokens: int = 32_768
    """Maximum tokens per pack, in trees and in rows."""
    device: str = "cpu"
    precision: Precision = "float32"
    shape: str = "tiny"
    """A name of :data:`SHAPES`."""
    lora_rank: int = 0
    """Rank of the adapters that are trained; with 0 all weights are."""
    recompute: bool = False

    @property
    def policy(self) -> PolicyShape:
        return SHAPES[self.shape]


@dataclass(frozen=True, slots=True)
class TrainFigures:
    """The figures of one batch, in trees and in padded rows."""

    batch: str
    model: str
    layout: Layout
    """The layout in which the model is trained when trees are requested."""
    samples: int
    tokens: int
    """Number of tokens that a step in trees computes."""
    tokens_ratio: float
    """Number of tokens in rows, without their padding, divided by the number in trees."""
    seconds: float
    """Seconds of a step in trees."""
    rows_seconds: float
    step_speedup: float
    peak_mib: float
    """Peak memory of the step in trees, in MiB, beyond that of the model."""
    rows_peak_mib: float
    max_rel_grad_diff: float
    """The largest difference of a gradient between the two layouts, relative to the largest
    gradient of its tensor."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Batch:
    name: str
    items: tuple[TrainItem, ...]
    model: str = "qwen3"
    """The architecture of the policy, ``qwen3`` or ``qwen3.5``."""


def batches(settings: TrainSettings) -> list[Batch]:
    """Return the batches of the benchmark, in its order."""
    branching = branching_items(settings)
    return [
        Batch("branching", branching),
        Batch("branching_hybrid", branching, "qwen3.5"),
        Batch("shared_prompt", shared_prompt_items(settings)),
        Batch("linear", linear_items(settings)),
    ]


def branching_items(settings: TrainSettings) -> tuple[TrainItem, ...]:
    """Return the turns of a session that thinks in every turn, with no thinking in its history."""
    rng = np.random.default_rng(1)
    history = _tokens(rng, settings.question)
    items = []
    for turn in range(settings.turns):
        sampled = _tokens(rng, settings.thinking + settings.answer)
        items.append(_item(f"turn-{turn}", "session", history, sampled, rng))
        answer = sampled[settings.thinking :]
        history = np.concatenate([history, answer, _tokens(rng, settings.result)])
    return tuple(items)


def shared_prompt_items(settings: TrainSettings) -> tuple[TrainItem, ...]:
    """Return one question with a short answer from each session."""
    rng = np.random.default_rng(2)
    prompt = _tokens(rng, settings.prompt)
    return tuple(
        _item("call", f"session-{each}", prompt, _tokens(rng, settings.tail), rng)
        for each in range(settings.sessions)
    )


def long_item(length: int) -> TrainItem:
    """Return a session of ``length`` tokens, of which the last quarter is sampled."""
    rng = np.random.default_rng(4)
    sampled = length // 4
    return _item("call", "session", _tokens(rng, length - sampled), _tokens(rng, sampled), rng)


def linear_items(settings: TrainSettings) -> tuple[TrainItem, ...]:
    """Return sessions that share nothing."""
    rng = np.random.default_rng(3)
    lengths = (settings.line * rng.lognormal(0, 0.3, settings.lines)).astype(int)
    return tuple(
        _item("call", f"session-{each}", _tokens(rng, length // 2), _tokens(rng, length // 2), rng)
        for each, length in enumerate(lengths)
    )


def _tokens(rng: np.random.Generator, count: int) -> NDArray[np.uint32]:
    return rng.integers(0, VOCABULARY, count, dtype=np.uint32)


def _item(
    call: str,
    session: str,
    prompt: NDArray[np.uint32],
    sampled: NDArray[np.uint32],
    rng: np.random.Generator,
) -> TrainItem:
    token_ids = np.concatenate([prompt, sampled])
    mask = np.arange(len(token_ids)) >= len(prompt)
    sample = Sample(
        session_id=session,
        leaf_call_id=f"{session}/{call}",
        kind=CallKind.MAIN,
        role=None,
        token_ids=token_ids,
        mask=mask,
        logprobs=np.where(mask, -math.log(VOCABULARY), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int64),
        calls=np.where(mask, 0, -1).astype(np.int32),
        call_ids=(f"{session}/{call}",),
        weight=1.0,
    )
    credit = np.full(len(token_ids), rng.normal(), np.float32)
    return TrainItem(sample, abs(hash(session)) % 2**31, session, credit)


@contextmanager
def bench_policies(settings: TrainSettings) -> Iterator[Callable[..., nn.Module]]:
    """Yield a loader of policies by architecture and, where it is given, by another precision.

    Their weights are random and, on one device, the same every time.
    """
    shape = settings.policy
    makers = {
        "qwen3": lambda at: make_policy(at, shape.model, vocab_size=shape.vocabulary),
        "qwen3.5": lambda at: make_hybrid_policy(at, shape.hybrid, vocab_size=shape.vocabulary),
    }
    compute = ComputeConfig(
        device=settings.device, precision=settings.precision, recompute=settings.recompute
    )
    lora = LoraConfig(rank=settings.lora_rank)
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:

        @lru_cache(1)
        def load(model: str, precision: Precision = settings.precision) -> nn.Module:
            made = Path(folder, model)
            if not made.exists():
                with torch.device(settings.device):
                    makers[model](made)
            return trainable_policy(made, replace(compute, precision=precision), lora)

        yield load


def bench_train(model: nn.Module, batch: Batch, settings: TrainSettings) -> TrainFigures:
    """Measure one batch in both layouts.

    On a CPU, the time is that of the process, so that other load on the machine does not count. On
    other devices, a first step, in which kernels are compiled, is not timed.
    """
    asked = PackingConfig(layout="tree", max_tokens=settings.max_tokens)
    packing = exact_packing(model, asked)
    rows = replace(asked, layout="padded")
    done: dict[str, tuple[list[Tensor], UpdateStats]] = {}

    def step(name: str, packed: PackingConfig) -> None:
        done[name] = _gradients(model, batch.items, packed)

    steps: list[Callable[[], None]] = [
        lambda: step("trees", packing),
        lambda: step("rows", rows),
    ]
    if torch.device(settings.device).type != "cpu":
        for each in steps:
            each()
    seconds, rows_seconds = fastest(steps, settings.device)
    (gradients, stats), (rows_gradients, _) = done["trees"], done["rows"]
    peak = _peak_mib(model, batch.items, packing)
    rows_peak = _peak_mib(model, batch.items, rows)
    return TrainFigures(
        batch=batch.name,
        model=batch.model,
        layout=packing.layout,
        samples=len(batch.items),
        tokens=stats.computed_tokens,
        tokens_ratio=stats.unshared_tokens / stats.computed_tokens,
        seconds=seconds,
        rows_seconds=rows_seconds,
        step_speedup=rows_seconds / seconds,
        peak_mib=peak,
        rows_peak_mib=rows_peak,
        max_rel_grad_diff=max(
            float((ours - theirs).abs().max() / theirs.abs().max())
            for ours, theirs in zip(gradients, rows_gradients, strict=True)
            if theirs.any()
        ),
    )


def fastest(steps: Sequence[Callable[[], object]], device: str) -> list[float]:
    """Return the seconds of the fastest run of each step; the steps take turns."""
    times: list[list[float]] = [[] for _ in steps]
    while not times[0] or (sum(map(sum, times)) < ENOUGH_S * len(steps) and len(times[0]) < 3):
        for step, found in zip(steps, times, strict=True):
            started = _now(device)
            step()
            found.append(_now(device) - started)
    return [min(found) for found in times]


def _now(device: str) -> float:
    if torch.device(device).type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def _config(packing: PackingConfig, rate: float) -> GrpoConfig:
    return GrpoConfig(
        optimizer=OptimizerConfig(learning_rate=rate, grad_clip=1e9),
        packing=packing,
        loss=LossConfig(importance="none"),
    )


def one_step(model: nn.Module, items: Sequence[TrainItem], packing: PackingConfig) -> UpdateStats:
    """Run one update, which leaves the weights as they are."""
    optimizer = torch.optim.AdamW(_trained(model), lr=0.0)
    return update_policy(model, optimizer, items, _config(packing, 0.0), step=0, version=0)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


class _Keeper(torch.optim.AdamW):
    """An optimizer that keeps the gradients of its last step."""

    kept: list[Tensor]

    def step(self, closure: Any = None) -> Any:
        self.kept = [
            each.grad.detach().clone()
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        return super().step(closure)


def _gradients(
    model: nn.Module, items: Sequence[TrainItem], packing: PackingConfig
) -> tuple[list[Tensor], UpdateStats]:
    keeper = _Keeper(_trained(model), lr=0.0, weight_decay=0.0)
    stats = update_policy(model, keeper, items, _config(packing, 0.0), step=0, version=0)
    return keeper.kept, stats


def _peak_mib(model: nn.Module, items: Sequence[TrainItem], packing: PackingConfig) -> float:
    """Return the peak of memory that a step has allocated at a time, in MiB."""
    if next(model.parameters()).device.type != "cpu":
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        one_step(model, items, packing)
        return float(torch.accelerator.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        one_step(model, items, packing)
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = np.cumsum([size for _, size in sorted(events)])
    return float(held.max(initial=0)) / 2**20


def one_thread() -> None:
    """Use one thread: a CPU's other cores belong to other programs."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(1)
