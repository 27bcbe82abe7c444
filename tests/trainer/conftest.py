"""Tiny policies, and sessions made by hand: what the trainer's tests share."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, Reward, RewardSource, SessionRecord
from bridle.trainer.policy.model import load_policy
from bridle.trainer.policy.tiny import TinyShape, make_policy
from bridle.trainer.policy.tiny_tokenizer import train_tokenizer

VOCABULARY = 64


@pytest.fixture(autouse=True)
def one_thread_and_fixed_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of 2 layers and 64 token ids with tied embeddings, without a tokenizer."""
    directory = tmp_path_factory.mktemp("policy")
    shape = TinyShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, context=512)
    make_policy(directory, shape, vocab_size=VOCABULARY, seed=1)
    return directory


@pytest.fixture(scope="session")
def chat_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a trained tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("chat-policy")
    texts = ["What is the capital of Norway? Oslo. Call lookup with 12 and answer: 3 + 4 = 7"] * 20
    size = train_tokenizer(directory, texts, vocab_size=400)
    shape = TinyShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=size, seed=2)
    return directory


@pytest.fixture
def policy(policy_directory: Path) -> Any:
    return load_policy(policy_directory)


@pytest.fixture
def double_policy(policy_directory: Path) -> Any:
    return truly_double(load_policy(policy_directory, dtype="float64"))


def truly_double(model: Any) -> Any:
    """Transformers rounds norms and rotary angles to float32 whatever the model's dtype; here they
    are float64 too, so that two orders of computation agree to float64's precision."""

    class Rotary(torch.nn.Module):
        def __init__(self, inverse_frequencies: torch.Tensor) -> None:
            super().__init__()
            self.inverse_frequencies = inverse_frequencies.double()

        def forward(self, _: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
            angles = positions[..., None].double() * self.inverse_frequencies
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos(), angles.sin()

    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Qwen3RMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    model.model.rotary_emb = Rotary(model.model.rotary_emb.inv_freq)
    return model


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(
        token_ids: Sequence[int],
        trained: Sequence[int],
        *,
        session: str = "s",
        logprobs: float | Sequence[float] = -1.0,
        version: int = 0,
        weight: float = 1.0,
        role: str | None = None,
    ) -> Sample:
        """A branch whose positions ``trained`` were sampled and are trained."""
        size = len(token_ids)
        mask = np.zeros(size, dtype=np.bool_)
        mask[list(trained)] = True
        values = np.zeros(size, dtype=np.float32)
        values[mask] = logprobs
        return Sample(
            session_id=session,
            leaf_call_id=f"{session}-call",
            kind=CallKind.MAIN,
            role=role,
            token_ids=np.asarray(token_ids, dtype=np.uint32),
            mask=mask,
            logprobs=values,
            versions=np.where(mask, version, -1).astype(np.int64),
            calls=np.where(mask, 0, -1).astype(np.int32),
            call_ids=(f"{session}-call",),
            weight=weight,
        )

    return make


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    def make(
        samples: Sequence[Sample],
        reward: float | None = None,
        *,
        session: str = "s",
        group: str | None = "g",
        outcome: str | None = "completed",
        masked: Mapping[str, int] | None = None,
        dropped: Mapping[str, int] | None = None,
    ) -> Episode:
        trained = sum(int(sample.mask.sum()) for sample in samples)
        masked, dropped = masked or {}, dropped or {}
        rewards = (
            ()
            if reward is None
            else (Reward(session, "score", reward, time.time(), source=RewardSource.VERIFIER),)
        )
        return Episode(
            session=SessionRecord(id=session, created_at=0.0, group_id=group, outcome=outcome),
            samples=tuple(samples),
            rewards=rewards,
            conservation=Conservation(
                captured=trained + sum(masked.values()) + sum(dropped.values()),
                trained=trained,
                masked=masked,
                dropped=dropped,
            ),
        )

    return make


@pytest.fixture(scope="session")
def double_policy_shared(policy_directory: Path) -> Any:
    """For tests that leave no gradients and change no weights."""
    return truly_double(load_policy(policy_directory, dtype="float64"))
