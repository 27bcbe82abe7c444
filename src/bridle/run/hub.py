"""Models named by their directory, by a short name, or by their name on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bridle.errors import UsageError
from bridle.extras import needs_extra
from bridle.registry import Registry

_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER: Final = ("*.json", "*.jinja", "additional_chat_templates/*", "*.model", "*.txt")
"""The files beside the weights: tokenizer, template, configuration."""
POLICIES: Final[Registry[Callable[[], Path]]] = Registry(
    "policy",
    "bridle.policies",
    {
        "smollm2": "bridle.recipes.models.smollm2:smollm2_directory",
        "tiny": "bridle.recipes.models.tiny:tiny_directory",
    },
)
"""Models for trials, by a short name. A part is a function that returns the model's directory,
which it makes at its first call."""
_WEIGHTS: Final = ("*.safetensors", *_TOKENIZER)


def model_directory(model: str) -> Path:
    """Return the directory of a model with its weights.

    It is ``model`` itself, or that of a short name of :data:`POLICIES`, which is made once, or the
    Hub's, which is fetched once.

    Raise :class:`UsageError` for a name that is no directory and cannot be fetched.
    """
    return _directory(model, _WEIGHTS)


def tokenizer_directory(model: str) -> Path:
    """Return the directory of a model's tokenizer.

    It is like :func:`model_directory`, but without the weights.
    """
    return _directory(model, _TOKENIZER)


def cached_tokenizer(model: str) -> Path | None:
    """Return the directory of a model's tokenizer if it is on this machine; fetch nothing."""
    directory = Path(model)
    if (directory / "tokenizer.json").is_file():
        return directory
    if _NAME.fullmatch(model) is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "tokenizer.json")
    return Path(found).parent if isinstance(found, str) else None


def _directory(model: str, files: tuple[str, ...]) -> Path:
    directory = Path(model)
    if directory.is_dir():
        return directory
    if model in POLICIES.names():
        with needs_extra("train", f"the policy {model} needs the training extra"):
            return POLICIES.get(model)()
    if _NAME.fullmatch(model) is None or directory.exists():
        raise UsageError(
            f"{model} is neither a directory, nor one of {', '.join(POLICIES.names())}, nor a name "
            "on the Hub (OWNER/MODEL)"
        )
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except (OSError, httpx.HTTPError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{model} is no directory here and cannot be fetched from the Hub: {cause}. Without a "
            f"network, copy here what `hf download {model}` fetches elsewhere, and name its folder"
        ) from error
