"""A model that costs an engine little at 100,000 tokens, with a genuine tokenizer and template.

An engine that serves it spends its time on the requests: on rendering, tokenising, detokenising and
streaming.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

_FAMILY: Final = "qwen3-2507"
_CONTEXT: Final = 131_072


def long_policy() -> Path:
    """Return the directory of a policy of one small layer with random weights and that tokenizer.

    It is made in the cache if it is missing. Raise
    :class:`bridle.recipes.models.packages.PackageNotFetched`.
    """
    from bridle.bench.families import model_directory
    from bridle.engine.contract.tokenizer import Tokenizer
    from bridle.recipes.models.packages import cache_directory
    from bridle.recipes.models.tiny import TinyShape, make_policy
    from bridle.trainer.policy.durable import atomic_directory

    directory = cache_directory() / "models" / "long"
    if not directory.is_dir():
        with atomic_directory(directory) as made:
            for file in model_directory(_FAMILY).glob("tokenizer*.json"):
                shutil.copy(file, made)
            size = Tokenizer(made).vocabulary_size
            shape = TinyShape(64, 1, 1, 1, intermediate=64, context=_CONTEXT, head_size=32)
            make_policy(made, shape, vocab_size=size)
    return directory
