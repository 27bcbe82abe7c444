"""Harnesses for containers: each is built into an image of its own and kept in a volume.

The volume is mounted read-only at ``/opt/bridle``, so that any harness runs in any task's image. It
holds a Python with every library that it loads, and the harness. A Node harness has its Node; that
needs the GNU C library of the task's image.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from bridle.harnesses.install import NODE, PYTHON, NotLaunchable
from bridle.harnesses.sandboxes.container.engine import Engine
from bridle.harnesses.sandboxes.container.images import DEFAULT_IMAGE

MOUNTED: Final = PurePosixPath("/opt/bridle")
LAYERS: Final = "bridle-harness"
LABEL: Final = "bridle.harness"
_HERE: Final = Path(__file__).with_name("layer")


@dataclass(frozen=True, slots=True)
class Layer:
    """The files that are built for one harness.

    Without ``pins`` and ``command`` they are Python alone.
    """

    name: str
    pins: str | None = None
    """The ``NAME`` of ``harnesses/python/NAME.txt``, for a Python harness."""
    command: str | None = None
    """The command of a Node harness."""
    node_modules: str = "node_modules"
    """The folder below ``harnesses/node`` in which the install script put the harness."""
    packages: tuple[str, ...] = ()
    """The packages of ``node_modules`` that it needs; all of them if empty."""

    @property
    def program(self) -> str:
        """The command in the layer's ``bin`` that starts the harness."""
        return self.command or ("mini" if self.pins else "python3")

    @property
    def asks(self) -> str:
        """The argument with which the command reports on itself and ends."""
        return "--help" if self.pins else "--version"

    @property
    def image(self) -> str:
        return f"{LAYERS}-{self.name}:{self.digest()}"

    @property
    def volume(self) -> str:
        return f"{LAYERS}-{self.name}-{self.digest()}"

    def digest(self) -> str:
        """Return a digest of everything that decides what is built."""
        files = sorted(_HERE.glob("*.py"))
        if self.pins:
            files.append(PYTHON / f"{self.pins}.txt")
        if self.command:
            files.append((NODE / self.node_modules).with_name("package.json"))
        text = self.dockerfile().encode() + b"".join(file.read_bytes() for file in files)
        return hashlib.sha256(text).hexdigest()[:16]

    def dockerfile(self) -> str:
        lines = [
            f"FROM {DEFAULT_IMAGE}",
            "COPY *.py /build/",
            f"RUN python3 /build/pack.py {MOUNTED}",
        ]
        if self.command:
            lines += [
                f"COPY node {MOUNTED}/bin/node",
                f"COPY node_modules {MOUNTED}/node_modules",
                f"RUN ln -s ../node_modules/.bin/{self.command} {MOUNTED}/bin/{self.command}",
            ]
        if self.pins:
            pins = f"{self.pins}.txt"
            lines += [
                f"COPY {pins} /build/",
                f"RUN pip install --no-cache-dir --no-deps --target {MOUNTED}/packages "
                f"-r /build/{pins}",
                f"RUN python3 /build/scripts.py {MOUNTED}",
            ]
        return "\n".join([*lines, f'LABEL {LABEL}="{self.name}"', ""])

    def write_context(self, folder: Path) -> None:
        """Write the files that the build reads. Raise :class:`NotLaunchable`."""
        (folder / "Dockerfile").write_text(self.dockerfile(), encoding="utf-8")
        for script in _HERE.glob("*.py"):
            shutil.copy(script, folder)
        if self.pins:
            shutil.copy(PYTHON / f"{self.pins}.txt", folder)
        if self.command:
            self._write_node(folder)

    def _write_node(self, folder: Path) -> None:
        source, target = NODE / self.node_modules, folder / "node_modules"
        node = next(NODE.glob("node_modules/node-linux-*/bin/node"), None)
        command = source / ".bin" / str(self.command)
        if node is None or not command.exists():
            raise NotLaunchable(f"{self.name} is not installed; run harnesses/node/install --all")
        _link_or_copy(node, folder / "node")
        all_of_them = (path.name for path in source.iterdir() if path.is_dir())
        for package in self.packages or all_of_them:
            if package != ".bin":
                shutil.copytree(
                    source / package, target / package, symlinks=True, copy_function=_link_or_copy
                )
        (target / ".bin").mkdir()
        (target / ".bin" / command.name).symlink_to(command.readlink())


LAYER_OF: Final = {
    layer.name: layer
    for layer in (
        Layer("none"),
        Layer("mini-swe-agent", pins="mini-swe-agent"),
        Layer("codex", command="codex", packages=("@openai",)),
        Layer("claude-code", command="claude", packages=("@anthropic-ai/claude-code",)),
        Layer("qwen-code", command="qwen", node_modules="more/node_modules"),
        Layer("pi", command="pi", node_modules="more/node_modules"),
        Layer("opencode", command="opencode", node_modules="more/node_modules"),
        Layer("gemini-cli", command="gemini", node_modules="more/node_modules"),
    )
}
"""The layers by harness; ``none`` is for any other command."""


@dataclass(frozen=True, slots=True)
class MountedPrograms:
    """The places of a layer's programs in a container."""

    layer: Layer

    def node(self, command: str) -> str:
        if command != self.layer.command:
            raise NotLaunchable(f"the container has the harness {self.layer.name}, not {command}")
        return str(MOUNTED / "bin" / command)

    def python(self, harness: str, command: str) -> str:
        if harness != self.layer.pins:
            raise NotLaunchable(f"the container has the harness {self.layer.name}, not {harness}")
        return str(MOUNTED / "bin" / command)

    def search_path(self, path: str) -> str:
        return f"{MOUNTED}/bin:{path}"


async def install(engine: Engine, layer: Layer) -> bool:
    """Build a layer and fill its volume; return ``False`` if it is there already.

    One process at a time does this for a layer. Raise :class:`NotLaunchable` when it cannot be
    built.
    """
    if await is_installed(engine, layer):
        return False
    with (Path(tempfile.gettempdir()) / f"{layer.volume}.lock").open("w") as turn:
        await asyncio.to_thread(fcntl.flock, turn, fcntl.LOCK_EX)
        return await _install(engine, layer)


async def _install(engine: Engine, layer: Layer) -> bool:
    if await is_installed(engine, layer):
        return False
    with tempfile.TemporaryDirectory(
        prefix="bridle-layer-", dir=NODE if layer.command else None
    ) as made:
        await asyncio.to_thread(layer.write_context, Path(made))
        built = await engine.run("build", "-q", "-t", layer.image, made, limit_s=1800)
    if built.code:
        raise NotLaunchable(f"cannot build the layer of {layer.name}: {built.error}")
    await engine.run("volume", "rm", "-f", layer.volume)
    await engine.check("volume", "create", "--label", f"{LABEL}={layer.name}", layer.volume)
    # An empty volume gets what the image has at that path.
    mount = f"{layer.volume}:{MOUNTED}"
    await engine.check(
        "run", "--rm", "--network", "none", "-v", mount, layer.image, "/bin/true", limit_s=600
    )
    await engine.check("tag", layer.image, f"{layer.image}-filled")
    return True


async def is_installed(engine: Engine, layer: Layer) -> bool:
    """Return whether the image was built and its volume filled to the end."""
    filled = await engine.run("image", "inspect", "-f", "{{.Id}}", f"{layer.image}-filled")
    volume = await engine.run("volume", "inspect", layer.volume)
    return not filled.code and not volume.code


async def remove(engine: Engine, layer: Layer) -> None:
    """Remove the volume and the images of a layer, if they are there."""
    await engine.run("volume", "rm", "-f", layer.volume)
    await engine.run("rmi", "-f", f"{layer.image}-filled", layer.image)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a hard link if both lie on one file system, else a copy.

    Some harnesses have hundreds of megabytes.
    """
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
