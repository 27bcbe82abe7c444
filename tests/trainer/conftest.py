"""Tiny policies, and sessions made by hand: what the trainer's tests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.model import ON_CPU, load_policy, trainable_policy

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
    """Compute norms and rotary angles in float64.

    Transformers rounds them to float32 whatever the model's dtype. Here they are float64 too, so
    that two orders of computation agree to float64's precision.
    """

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
    """A policy for tests that leave no gradients and change no weights."""
    return truly_double(load_policy(policy_directory, dtype="float64"))


class Bandit:
    """Two arms: a session's first token is even (reward 1) or odd (reward 0)."""

    prompts = ([5, 9, 12], [5, 9, 30, 31])
    sampled = 2
    """Tokens of a session."""

    def __init__(
        self,
        model: Any,
        make_sample: Callable[..., Sample],
        make_episode: Callable[..., Episode],
        sessions: int = 24,
    ) -> None:
        self.model = model
        self.make_sample = make_sample
        self.make_episode = make_episode
        self.sessions = sessions
        """The number of sessions of a prompt."""
        self.versions: list[int] = []
        self.lag = 0

    @torch.no_grad()
    def __call__(self, step: int, version: int) -> Sequence[Episode]:
        self.versions.append(version)
        return [
            episode
            for number, prompt in enumerate(self.prompts)
            for episode in self.group(f"{step}-{number}", prompt, version - self.lag)
        ]

    def group(self, group: str, prompt: list[int], version: int) -> list[Episode]:
        made = self.model.generate(
            torch.tensor([prompt] * self.sessions),
            attention_mask=torch.ones(self.sessions, len(prompt), dtype=torch.long),
            do_sample=True,
            top_k=0,
            max_new_tokens=self.sampled,
            min_new_tokens=self.sampled,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        scores = torch.stack(made.logits, dim=1).log_softmax(-1)
        sampled = made.sequences[:, len(prompt) :]
        logprobs = scores.gather(2, sampled[..., None]).squeeze(2)
        return [
            self.make_episode(
                [
                    self.make_sample(
                        prompt + sampled[i].tolist(),
                        range(len(prompt), len(prompt) + self.sampled),
                        session=f"{group}-{i}",
                        logprobs=logprobs[i].tolist(),
                        version=version,
                    )
                ],
                float(sampled[i, 0] % 2 == 0),
                session=f"{group}-{i}",
                group=group,
                masked={"length": 1},
            )
            for i in range(self.sessions)
        ]


@pytest.fixture
def make_bandit(make_sample: Callable[..., Sample], make_episode: Callable[..., Episode]) -> Any:
    def make(model: Any) -> Bandit:
        return Bandit(model, make_sample, make_episode)

    return make


@pytest.fixture
def bandit_loop(policy_directory: Path, make_bandit: Any, tmp_path: Path) -> Any:
    """Makes a loop on a bandit, and the bandit."""

    def make(config: GrpoConfig, **arguments: Any) -> tuple[GrpoLoop, Bandit]:
        model = trainable_policy(policy_directory, ON_CPU, config.lora)
        bandit = make_bandit(model)
        directory = arguments.pop("directory", tmp_path / "checkpoints")
        learner = Learner(model, config, arguments.pop("reference", None))
        policy = TrainedPolicy(learner, directory, arguments.pop("publish", None))
        collect = arguments.pop("collect", None) or bandit
        if (account := arguments.pop("account", None)) is not None:
            arguments["sinks"] = SimpleNamespace(write=lambda step, values: None, account=account)
        return GrpoLoop(config, [policy], collect, **arguments), bandit

    return make
