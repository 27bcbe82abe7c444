"""Images that tasks name: pulled when missing, or built once for what a folder contains."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from bridle.harnesses.sandboxes.base import LaunchRefused
from bridle.harnesses.sandboxes.container.engine import Engine, require_words
from bridle.harnesses.sandboxes.spec import ContainerSpec

DEFAULT_IMAGE: Final = "python:3.11-slim"
TASK_IMAGES: Final = "bridle-task"


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the engine has."""

    name: str
    environment: dict[str, str]
    workdir: str
    user: str


class Images:
    """Makes images available; each is built or pulled once at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, Image] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, spec: ContainerSpec) -> Image:
        """Return the image of a task.

        Raise :class:`LaunchRefused` when it cannot be built or pulled.
        """
        if spec.build is None:
            name = spec.image or DEFAULT_IMAGE
        else:
            digest = await asyncio.to_thread(digest_of, Path(spec.build))
            name = f"{TASK_IMAGES}:{digest}"
        require_words([name])
        async with self._turns[name]:
            if name not in self._known:
                self._known[name] = await self._find(name) or await self._make(name, spec)
        return self._known[name]

    async def _find(self, name: str) -> Image | None:
        found = await self._engine.run("image", "inspect", name)
        if found.code:
            return None
        described: dict[str, Any] = msgspec.json.decode(found.out)[0]
        config = described.get("Config") or {}
        pairs = (entry.partition("=") for entry in config.get("Env") or ())
        return Image(
            name,
            {key: value for key, _, value in pairs},
            config.get("WorkingDir") or "",
            config.get("User") or "",
        )

    async def _make(self, name: str, spec: ContainerSpec) -> Image:
        limit_s = spec.build_timeout_s
        if spec.build is None:
            made = await self._engine.run("pull", "--quiet", name, limit_s=limit_s)
            problem = f"cannot pull the image {name}: {made.error}"
        else:
            made = await self._engine.run("build", "-q", "-t", name, spec.build, limit_s=limit_s)
            problem = f"cannot build {spec.build}: {made.error or made.out.decode()[-600:]}"
        image = None if made.code else await self._find(name)
        if image is None:
            raise LaunchRefused(problem)
        return image


def digest_of(folder: Path) -> str:
    """Return a digest of names, modes and contents below ``folder``.

    Raise :class:`LaunchRefused` when it has no Dockerfile.
    """
    if not (folder / "Dockerfile").is_file():
        raise LaunchRefused(f"{folder} has no Dockerfile")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest.update(f"{path.relative_to(folder)}\0{status.st_mode:o}\0".encode())
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:20]
