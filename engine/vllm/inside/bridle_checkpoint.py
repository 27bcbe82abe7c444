"""A check that weights are a version of the served model, made before a layer is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

Shapes = Mapping[str, tuple[int, ...]]


def check_directory(served: Path, directory: Path) -> None:
    """Raise ValueError unless ``directory`` holds the tensors that ``served`` holds.

    Names and shapes must be equal, except that an output layer may be left out, or be there, if the
    embeddings are tied. Without files in ``served`` (a hub name, a pruned version) there is nothing
    to compare with.
    """
    shapes = checkpoint_shapes(directory)
    if not any(served.glob("*.safetensors")):
        return
    _compare(checkpoint_shapes(served), shapes, directory, served, str(directory))


def check_shapes(served: Path, shapes: Shapes) -> None:
    """Raise ValueError unless tensors of these shapes are a version of the model in ``served``.

    The comparison is that of :func:`check_directory`, but ``served`` must have files to compare
    with. A directory can do without, because a program that knew the model wrote it.
    """
    _compare(checkpoint_shapes(served), shapes, served, served, "what was announced")


def _compare(expected: Shapes, shapes: Shapes, config_in: Path, served: Path, what: str) -> None:
    config = json.loads((config_in / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    different = {
        name
        for name in expected.keys() | shapes.keys()
        if expected.get(name) != shapes.get(name) and not (tied and name.endswith("lm_head.weight"))
    }
    if different:
        shown = ", ".join(sorted(different)[:3])
        raise ValueError(
            f"{what} is not a version of the model in {served}: {len(different)} tensors "
            f"differ in name or shape ({shown}); the weights were not changed"
        )


def checkpoint_shapes(directory: Path) -> Shapes:
    """Return the shape of each tensor of a safetensors checkpoint, from the files' headers.

    Raise ValueError if there are no files, or if one cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no safetensors files; the weights were not changed")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            # Opening compares the header with the file's length: a cut file is found here.
            with safe_open(str(file), framework="pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                    shapes[name] = tuple(checkpoint.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: {error}; the weights were not changed") from error
    return shapes
