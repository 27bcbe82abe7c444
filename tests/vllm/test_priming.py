"""Replies are decoded the same after the end of their prompt as after all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers.decoders
from tokenizers import Tokenizer

from bridle.bench.families import FAMILIES
from bridle.bench.family_tokenizers import FURTHER_TOKENIZERS, tokenizer_directory
from bridle.recipes.models.packages import cache_directory
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

TOKENIZERS = sorted({*(family.tokenizer for family in FAMILIES.values()), *FURTHER_TOKENIZERS})


def test_a_reply_after_any_prompt_has_the_same_text(
    inside: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    priming = inside("bridle_decoding")
    train_tokenizer(tmp_path, [priming.SAMPLE], vocab_size=400)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert priming.decodes_alike(tokenizer)
    monkeypatch.setattr(
        priming.TailStream, "_first", lambda _, tokenizer, each: tokenizer.decode([each])
    )
    assert not priming.decodes_alike(tokenizer)


@pytest.mark.models
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_genuine_tokenizers_decode_the_same(inside: Callable[[str], ModuleType], name: str) -> None:
    directory = tokenizer_directory(name, cache_directory())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert inside("bridle_decoding").decodes_alike(tokenizer)


class Counting:
    """A tokenizer whose tokens are characters; it remembers how many it has decoded."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.texts.get(each, "x") for each in ids)


@pytest.mark.parametrize("last", ["", "\N{REPLACEMENT CHARACTER}"])
def test_a_tail_without_whole_text_primes_with_all(
    inside: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    priming = inside("bridle_decoding")
    primed: list[int] = []

    class Stream:
        def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
            primed.append(len(ids))

        def step(self, tokenizer: Any, token_id: int) -> str:
            return "x"

    monkeypatch.setattr(priming, "WholeStream", Stream)
    plain = Counting({})
    priming.TailStream(range(100), True).step(plain, 1)
    odd = Counting({99: last} if last else dict.fromkeys(range(100), ""))
    priming.TailStream(range(100), True).step(odd, 1)
    priming.TailStream(range(10), True).step(plain, 1)
    assert primed == [priming.TAIL, 100, 10]


def test_the_middleware_is_the_app_itself(
    inside: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    priming = inside("bridle_decoding")
    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", priming.WholeStream)
    app = object()
    assert priming.PrimeWithTail(app) is app
    assert tokenizers.decoders.DecodeStream is priming.TailStream
