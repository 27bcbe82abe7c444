"""``renderers``: the next prompt of a conversation, by hand-written code for each family."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from renderers import AutoRendererConfig, create_renderer
from tokenizers import Tokenizer

CASES = json.loads(Path(os.environ["BRIDLE_REFEREES_INPUTS"]).read_text())


class Adapter:
    """The tokenizer of a family in the form that the judge reads."""

    def __init__(self, directory: str, name: str) -> None:
        self.name_or_path = name
        self._backend = Tokenizer.from_file(f"{directory}/tokenizer.json")
        config = json.loads(Path(directory, "tokenizer_config.json").read_text())
        self.unk_token_id = self._special(config.get("unk_token"))
        self.eos_token_id = self._special(config.get("eos_token"))
        self.bos_token_id = self._special(config.get("bos_token"))
        self.bos_token = config.get("bos_token")
        self.eos_token = config.get("eos_token")

    def _special(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Any, **_: Any) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._backend.token_to_id(tokens)
        return [self._backend.token_to_id(token) for token in tokens]


tokenizer_of = cache(Adapter)


@cache
def renderer(directory: str, name: str) -> Any:
    # The judge renders no tail where its rules would drop reasoning from the history.
    config = AutoRendererConfig(thinking_retention="all")
    return create_renderer(tokenizer_of(directory, name), config)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_tail(case: dict[str, Any]) -> None:
    judge = renderer(case["directory"], case["model"])
    rendered = judge.bridge_to_next_turn(
        case["prompt"], case["sampled"], case["messages"], tools=[case["tool"]]
    )
    if rendered is None:
        pytest.fail("the judge renders no tail", pytrace=False)
    tokenizer = tokenizer_of(case["directory"], case["model"])
    start = len(case["prompt"]) + len(case["sampled"])
    ours, theirs = case["expected"][start:], rendered.token_ids[start:]
    if ours != theirs:
        shown = f"ours {tokenizer.decode(ours)!r}, theirs {tokenizer.decode(theirs)!r}"
        pytest.fail(f"the tails differ: {shown}", pytrace=False)
