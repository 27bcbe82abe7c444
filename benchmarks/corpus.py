"""Real text and token ids to measure with: Python's own standard library, which is everywhere.

Half of its files train a byte-level BPE vocabulary of 32,768; the other half is the text of the
sessions, so that the vocabulary was not made from the measured text.
"""

from __future__ import annotations

import re
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bridle.store.records import TokenIds

VOCABULARY: Final = 32_768

_TRAINING_BYTES: Final = 6_000_000
_PROSE = re.compile(r'"""(.{200,}?)"""', re.DOTALL)


@dataclass(frozen=True)
class Corpus:
    """The text of sessions by its use, and its tokenizer."""

    tokenizer: Tokenizer
    code: str
    """The output of tools: source files, one after the other."""
    prose: str
    """The replies of a model: documentation."""

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of ``text``, ``uint32[T]``."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.uint32)

    def pieces(self, ids: TokenIds) -> list[str]:
        """Return the text that each token adds, as an engine streams it: whole characters only."""
        stream, pieces = decoders.DecodeStream(skip_special_tokens=False), []
        for token in ids:
            pieces.append(stream.step(self.tokenizer, int(token)) or "")
        return pieces


@cache
def corpus() -> Corpus:
    """Return the corpus.

    It is made once per process; its tokenizer is kept in the temporary folder.
    """
    training, sessions = _halves()
    code = "\n".join(sessions)
    prose = "\n".join(
        " ".join(found.split()) for text in sessions for found in _PROSE.findall(text)
    )
    return Corpus(_tokenizer("\n".join(training)[:_TRAINING_BYTES]), code, prose)


def _halves() -> tuple[list[str], list[str]]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not {"site-packages", "test", "tests", "encodings"} & set(path.relative_to(folder).parts)
    ]
    texts = [path.read_text("utf-8", errors="ignore") for path in files]
    return texts[::2], texts[1::2]


def _tokenizer(text: str) -> Tokenizer:
    kept = Path(tempfile.gettempdir()) / f"bridle-bench-{VOCABULARY}-{len(text)}.json"
    if kept.exists():
        return Tokenizer.from_file(str(kept))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(kept))
    return tokenizer
