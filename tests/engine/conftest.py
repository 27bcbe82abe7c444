"""Tiny policies, made once per session, and engines that serve them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.embedded import EmbeddedEngine
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

WORDS = "look the key up then add what it says to seven and answer naïve 日本 😀"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two cores are shared by everything that a test runs."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy of about a hundred thousand parameters, 2048 tokens of context."""
    directory: Path = tmp_path_factory.mktemp("engine") / "tiny"
    chooser = random.Random(0)
    texts = [" ".join(chooser.choices(WORDS.split(), k=30)) for _ in range(40)]
    size = train_tokenizer(directory, texts, vocab_size=512)
    make_policy(directory, TinyShape(hidden=64, context=2048), vocab_size=size, seed=3)
    return directory


@pytest.fixture(scope="session")
def other_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    directory: Path = tmp_path_factory.mktemp("engine") / "other"
    shape = TinyShape(hidden=64, context=2048)
    make_policy(directory, shape, vocab_size=Tokenizer(tiny_dir).backend.get_vocab_size(), seed=4)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_dir)


@pytest.fixture
def engine(tiny_dir: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(tiny_dir) as running:
        yield running


@pytest.fixture(scope="session")
def reference(tiny_dir: Path) -> Callable[[list[int]], torch.Tensor]:
    """Logprobs ``[T, V]`` of a plain Transformers forward pass over ``T`` ids."""
    return plain_logprobs(tiny_dir)


@pytest.fixture(scope="session")
def reference_of() -> Callable[[Path], Callable[[list[int]], torch.Tensor]]:
    return plain_logprobs


def plain_logprobs(directory: Path) -> Callable[[list[int]], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return found

    return logprobs


@pytest.fixture(scope="session")
def random_ids() -> Callable[[int, int], list[int]]:
    """``(seed, count)`` to ordinary token ids."""

    def make(seed: int, count: int) -> list[int]:
        chooser = random.Random(seed)
        return [chooser.randrange(3, 250) for _ in range(count)]

    return make
