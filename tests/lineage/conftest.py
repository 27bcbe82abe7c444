"""Fixtures of the lineage tests: a tokenizer per template family, and a session to talk in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.tokenizer import Tokenizer
from trainer.tiny import SPECIAL_TOKENS, train_tokenizer

TEMPLATES = Path(__file__).parent / "templates"

TEXTS = [
    "The quick brown fox looks up a word in the library and computes twelve times thirty-four.",
    'def look_up(word: str) -> dict: return {"name": "look_up", "arguments": {"word": word}}',
    "Une maison de café — ☕ naïve façade, Straße, 北京, привет.",
    Path(__file__).read_text(),
    (Path(__file__).parents[2] / "proxy" / "canonical.py").read_text(),
]


@dataclass(frozen=True)
class Family:
    """What a family of templates needs of its tokenizer."""

    special_tokens: tuple[str, ...]
    eos_tokens: tuple[str, ...]


_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL += ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK += ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
_DEEPSEEK += ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")
_DEEPSEEK += ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")

FAMILIES = {
    "chatml_kept": Family(SPECIAL_TOKENS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family(SPECIAL_TOKENS, ("<|im_end|>", "<|endoftext|>")),
    "llama3": Family(
        ("<|end_of_text|>", "<|begin_of_text|>", *_LLAMA),
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ),
    "mistral": Family(("<unk>", "<s>", "</s>", *_MISTRAL), ("</s>",)),
    "gemma": Family(
        ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>")
    ),
    "glm": Family(("<|endoftext|>", *_GLM), ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "deepseek": Family(
        ("<pad>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", *_DEEPSEEK),
        ("<｜end▁of▁sentence｜>",),
    ),
    "harmony": Family(("<|endoftext|>", *_HARMONY), ("<|return|>", "<|call|>", "<|endoftext|>")),
}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A trained tokenizer with template and generation config, by family name."""
    made = {}
    for name, family in FAMILIES.items():
        directory = tmp_path_factory.mktemp(name)
        train_tokenizer(
            directory,
            TEXTS,
            vocab_size=1024,
            template=(TEMPLATES / f"{name}.jinja").read_text(),
            special_tokens=family.special_tokens,
            eos_token=family.eos_tokens[0],
        )
        tokenizer = Tokenizer(directory)
        eos = [tokenizer.token_id(token) for token in family.eos_tokens]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        made[name] = tokenizer
    return made


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each family's tokenizer in turn."""
    return tokenizers[request.param]
