"""A benchmark of TRL's own trainers on the samples of :mod:`bridle.bench.train`.

``GRPOTrainer`` takes rows, and ``AsyncGRPOTrainer`` trees.

Each computes its own loss of the same samples, advantages and logprobs, and the gradients. TRL's
trees need FlashAttention 3, which no CPU has. So each of its segments is a call of PyTorch's
``scaled_dot_product_attention``, as ours are.
"""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

from bridle.bench.train import VOCABULARY, TrainSettings, branching_items, fastest, one_step
from bridle.recipes.models.tiny import make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import PackingConfig
from bridle.trainer.policy.model import load_policy

_SETTINGS: dict[str, Any] = {
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "max_steps": 1,
}


@dataclass
class _NoRollouts:
    """A replacement for TRL's worker, because the samples exist already."""

    rollout_buffer: queue.Queue[Any]


@dataclass(frozen=True, slots=True)
class TrlFigures:
    """The seconds per step of the branching batch, by our update and by TRL's trainers."""

    version: str
    seconds: float
    """Seconds of our step in trees."""
    rows_seconds: float
    """Seconds of a step of ``GRPOTrainer``."""
    trees_seconds: float
    """Seconds of a step of ``AsyncGRPOTrainer``."""
    step_speedup: float
    """The speedup of our step over ``GRPOTrainer``."""
    trees_step_speedup: float
    """The speedup of our step over ``AsyncGRPOTrainer``."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def bench_trl(settings: TrainSettings) -> TrlFigures:
    """Measure our step and TRL's on the CPU."""
    items = branching_items(settings)
    packing_config = PackingConfig(max_tokens=settings.max_tokens)
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        directory = Path(folder, "policy")
        make_policy(directory, settings.policy.model, vocab_size=settings.policy.vocabulary)
        train_tokenizer(directory, ["TRL asks for a tokenizer"], vocab_size=VOCABULARY)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = load_policy(directory)
        # Rows take so long that beside them neither would be measured a second time.
        (rows,) = fastest(
            [_in_rows(directory, tokenizer, items, settings.max_tokens, Path(folder))], "cpu"
        )
        ours, trees = fastest(
            [
                lambda: one_step(model, items, packing_config),
                _in_trees(directory, tokenizer, items, settings.max_tokens, Path(folder)),
            ],
            "cpu",
        )
    return TrlFigures(trl.__version__, ours, rows, trees, rows / ours, trees / ours)


def _in_rows(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    items: Sequence[TrainItem],
    max_tokens: int,
    work: Path,
) -> Callable[[], object]:
    trainer = GRPOTrainer(
        model=str(directory),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(output_dir=str(work / "rows"), activation_checkpointing=False, **_SETTINGS),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 2}),
        processing_class=tokenizer,
    )
    longest = max(len(item.sample.token_ids) for item in items)
    fit = max(1, max_tokens // longest)

    def step() -> None:
        trainer.model.zero_grad()
        for start in range(0, len(items), fit):
            trainer.compute_loss(trainer.model, _rows(items[start : start + fit])).backward()

    return step


def _rows(items: Sequence[TrainItem]) -> dict[str, Tensor]:
    """Return a batch padded as ``GRPOTrainer`` pads it.

    Prompts are padded on the left, and completions on the right.
    """
    parts: dict[str, list[Tensor]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "advantages", "old_per_token_logps")
    }
    for item in items:
        first = int(np.flatnonzero(item.sample.mask)[0])
        ids = torch.from_numpy(item.sample.token_ids.astype(np.int64))
        parts["prompt_ids"].append(ids[:first])
        parts["completion_ids"].append(ids[first:])
        parts["advantages"].append(torch.tensor(item.credit[first]))
        parts["old_per_token_logps"].append(torch.from_numpy(item.sample.logprobs[first:]))
    pad = torch.nn.utils.rnn.pad_sequence
    prompts, completions = parts["prompt_ids"], parts["completion_ids"]
    return {
        "prompt_ids": pad(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad(
            [torch.ones_like(each) for each in prompts], batch_first=True, padding_side="left"
        ),
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": pad([torch.ones_like(each) for each in completions], batch_first=True),
        "advantages": torch.stack(parts["advantages"]),
        "old_per_token_logps": pad(parts["old_per_token_logps"], batch_first=True),
        "num_items_in_batch": torch.tensor(float(sum(map(len, completions)))),
    }


def _in_trees(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    items: Sequence[TrainItem],
    max_tokens: int,
    work: Path,
) -> Callable[[], object]:
    # It asks the card for its name, to say what share of its speed is used.
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = _SegmentAttention
    trainer = AsyncGRPOTrainer(
        model=str(directory),
        args=AsyncGRPOConfig(
            output_dir=str(work / "trees"), activation_checkpointing=False, **_SETTINGS
        ),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 2}),
        processing_class=tokenizer,
        rollout_worker=_NoRollouts(queue.Queue()),
        weight_transfer=object(),
    )
    trainer.current_gradient_accumulation_steps = 1
    samples = [
        {
            "input_ids": torch.from_numpy(item.sample.token_ids.astype(np.int64)),
            "completion_mask": torch.from_numpy(item.sample.mask.astype(np.int64)),
            "old_log_probs": torch.from_numpy(item.sample.logprobs),
            "advantage": float(item.credit[0]),
            "group_id": 0,
            "metrics": {},
        }
        for item in items
    ]

    def step() -> None:
        trainer.model.zero_grad()
        rows = [packing.TreeRow()]
        for sample in samples:
            if rows[-1].samples and not rows[-1].fits(sample, max_tokens):
                rows.append(packing.TreeRow())
            rows[-1].add(sample)
        for row in rows:
            batch = async_grpo_trainer.DataCollatorForRollout(pad_token_id=0).torch_call([[row]])
            trainer.compute_loss(trainer.model, batch).backward()

    return step


class _SegmentAttention:
    """A replacement for FlashAttention's function for segments of different lengths.

    The segments are computed one after another.
    """

    @staticmethod
    def flash_attn_varlen_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        *_: object,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Tensor:
        if not causal or window_size != (-1, -1):
            raise ValueError("only causal attention without a window is computed here")
        outputs = []
        lengths = [each.diff().tolist() for each in (query_starts, key_starts)]
        for queries, keys, values in zip(
            torch.split(query, lengths[0]),
            torch.split(key, lengths[1]),
            torch.split(value, lengths[1]),
            strict=True,
        ):
            before = len(keys) - len(queries)
            mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(before)
            repeat = queries.shape[1] // keys.shape[1]
            outputs.append(
                scaled_dot_product_attention(
                    queries.transpose(0, 1)[None],
                    keys.repeat_interleave(repeat, dim=1).transpose(0, 1)[None],
                    values.repeat_interleave(repeat, dim=1).transpose(0, 1)[None],
                    attn_mask=mask if before else None,
                    is_causal=not before,
                    scale=softmax_scale,
                )[0].transpose(0, 1)
            )
        return torch.cat(outputs)
