"""Test the number of token ids of a tokenizer's model."""

from pathlib import Path

import pytest

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.recipes.models.tiny_tokenizer import train_tokenizer


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 4096}', 4096),
        ('{"text_config": {"vocab_size": 8192}, "vocab_size": null}', 8192),
        ('{"vocab_size": 1}', None),
        ("null", None),
        ("{", None),
        (None, None),
    ],
)
def test_the_models_padded_vocabulary_counts_and_otherwise_the_tokenizers(
    tmp_path: Path, config: str | None, size: int | None
) -> None:
    train_tokenizer(tmp_path, ["four words are here"] * 4, vocab_size=300)
    (tmp_path / "config.json").unlink(missing_ok=True)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    tokenizer = Tokenizer(tmp_path)
    own = tokenizer.backend.get_vocab_size(with_added_tokens=True)
    assert tokenizer.vocabulary_size == (size or own)
