"""Training on preferences with TRL: DPO on pairs, KTO on labelled replies.

The rows are those of the exports ``preference`` and ``preference-labels``. Sources: DPO (Rafailov
et al. 2023, arXiv 2305.18290), KTO (Ethayarajh et al. 2024, arXiv 2402.01306).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from bridle.errors import UsageError
from bridle.trainer.config import SftConfig
from bridle.trainer.learner.rates import resolved
from bridle.trainer.learner.world import World
from bridle.trainer.policy.compute import choose_devices

_COLUMNS: Final = {
    "dpo": ("preference", frozenset({"prompt", "chosen", "rejected"})),
    "kto": ("preference-labels", frozenset({"prompt", "completion", "label"})),
}
_AT_A_TIME: Final = 8
"""The largest number of rows in one forward pass; larger batches add up gradients."""


@dataclass(frozen=True, slots=True)
class PreferenceFigures:
    """The result of a training on preferences."""

    rows: int
    updates: int
    first_loss: float
    last_loss: float


def read_preferences(path: Path, loss: str) -> list[dict[str, Any]]:
    """Return the rows of an export. Raise :class:`bridle.errors.UsageError` for other rows."""
    form, columns = _COLUMNS[loss]
    try:
        rows = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (ValueError, UnicodeError) as error:
        raise UsageError(f"{path} is no export as {form}: {error}") from error
    if not rows:
        raise UsageError(f"{path} has no row: groups need sessions with different rewards")
    if not all(isinstance(row, dict) and columns <= row.keys() for row in rows):
        raise UsageError(f"{path} is no export as {form}: a row has not all of {sorted(columns)}")
    return rows


def require_one_process(config: SftConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` if several devices are to train."""
    if World.current().size > 1 or len(choose_devices(config.compute.device)) > 1:
        raise UsageError("preferences are trained on one device: set compute.device")


def train_preferences(
    policy: Path, rows: list[dict[str, Any]], output: Path, config: SftConfig
) -> PreferenceFigures:
    """Train ``policy`` with ``config.loss``, and save it to ``output``.

    The reference is the policy itself as it was. Raise ``ImportError`` without TRL.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    from bridle.trainer.policy.model import save_policy

    make_config, make_trainer = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}[
        config.loss
    ]
    lora = config.lora
    model = AutoModelForCausalLM.from_pretrained(policy, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    trainer = make_trainer(
        model=model,
        args=make_config(output_dir=str(output), **_arguments(config)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear")
        if lora.rank
        else None,
    )
    ends = ends_of_turn(tokenizer.eos_token_id, model.generation_config.eos_token_id)
    trainer.train_dataset = trainer.train_dataset.map(partial(_sampled, ends=ends))
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    save_policy(model.merge_and_unload() if lora.rank else model, output, policy)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return PreferenceFigures(len(rows), trainer.state.global_step, losses[0], losses[-1])


def ends_of_turn(*stated: int | list[int] | None) -> frozenset[int]:
    """Return the ids that end a reply, from those that a tokenizer and a model state."""
    given = [each if isinstance(each, list) else [each] for each in stated if each is not None]
    return frozenset(chain.from_iterable(given))


def up_to_end(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return the ids of a reply up to the last of ``ends``, or all if there is none.

    A chat template may write more, such as a line break. No policy samples it, so that its gradient
    is larger than that of the reply.
    """
    last = max((at for at, each in enumerate(ids) if each in ends), default=len(ids) - 1)
    return list(ids[: last + 1])


def _sampled(row: Mapping[str, Any], ends: Collection[int]) -> dict[str, list[int]]:
    """Return the replies of a row that TRL has tokenised, without what follows them."""
    sides = ("chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids")
    return {side: up_to_end(row[side], ends) for side in sides if side in row}


def _arguments(config: SftConfig) -> dict[str, Any]:
    """Return the settings in the names of TRL's trainers."""
    optimizer = resolved(config).optimizer
    at_a_time = min(config.batch_size, _AT_A_TIME)
    (device,) = choose_devices(config.compute.device)
    return {
        "beta": config.beta,
        "num_train_epochs": config.epochs,
        "per_device_train_batch_size": at_a_time,
        "gradient_accumulation_steps": -(-config.batch_size // at_a_time),
        "learning_rate": optimizer.peak,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.grad_clip,
        "warmup_steps": optimizer.warmup_steps,
        "lr_scheduler_type": "cosine" if optimizer.schedule == "cosine" else "constant_with_warmup",
        "seed": config.seed,
        "max_length": None,
        "use_cpu": device.type == "cpu",
        "bf16": False,
        "gradient_checkpointing": device.type != "cpu",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
