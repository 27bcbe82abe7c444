"""``bridle harness``: the pinned harnesses as layers that containers mount."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from bridle.cli.options import JsonOption
from bridle.cli.terminal import err, fail, out, print_json, print_table
from bridle.harnesses.sandboxes.base import Launch, ProcessResult, SandboxRequest
from bridle.harnesses.sandboxes.container import ContainerProvider
from bridle.harnesses.sandboxes.container.engine import Engine
from bridle.harnesses.sandboxes.container.images import DEFAULT_IMAGE
from bridle.harnesses.sandboxes.container.layers import LAYER_OF, Layer, install, is_installed
from bridle.harnesses.sandboxes.spec import ContainerSpec

app = typer.Typer(no_args_is_help=True, help="Harnesses as layers that containers mount.")

Names = Annotated[list[str], typer.Argument(help=", ".join(LAYER_OF))]


@app.command("install")
def install_layers(names: Names) -> None:
    """Build layers for containers; a rollout builds the one that it lacks by itself."""
    engine = Engine.find()
    for layer in _layers(names):
        built = asyncio.run(install(engine, layer))
        out.print(f"{layer.name}: {'installed' if built else 'is there already'} ({layer.volume})")


@app.command("list")
def list_layers(json: JsonOption = False) -> None:
    """List the harnesses, and which have a layer of their pinned version."""
    engine = Engine.find()

    async def installed() -> list[bool]:
        return [await is_installed(engine, layer) for layer in LAYER_OF.values()]

    found = dict(zip(LAYER_OF.values(), asyncio.run(installed()), strict=True))
    if json:
        print_json([{"name": each.name, "installed": there} for each, there in found.items()])
        return
    rows = [(each.name, "yes" if there else "no", each.image) for each, there in found.items()]
    print_table(("HARNESS", "INSTALLED", "IMAGE"), rows, shrinks="IMAGE")


@app.command("check")
def check_layers(
    names: Names,
    image: Annotated[str, typer.Option(help="A task's image.")] = DEFAULT_IMAGE,
) -> None:
    """Start harnesses in a container of an image, and print what they report of themselves."""
    failed = 0
    for layer in _layers(names):
        finished = asyncio.run(_start(layer, image))
        if finished.exit_code == 0:
            out.print(f"{layer.name}: {_first_line(finished.stdout.tail)}")
        else:
            failed += 1
            err.print(f"{layer.name} does not run in {image}: {finished.stderr.tail.strip()}")
    if failed:
        fail(f"{failed} of {len(names)} do not run in {image}")


async def _start(layer: Layer, image: str) -> ProcessResult:
    sandboxes = ContainerProvider(layer.name)
    with TemporaryDirectory(prefix="bridle-check-") as directory:
        request = SandboxRequest(Path(directory), container=ContainerSpec(image=image))
        async with sandboxes.open(request) as sandbox:
            place = sandbox.place
            argv = (f"/opt/bridle/bin/{layer.program}", layer.asks)
            environment = {**place.environment, "HOME": str(place.home), "PATH": place.search_path}
            finished = await sandbox.exec(Launch(argv, environment, 60))
    await sandboxes.close()
    return finished


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it runs")


def _layers(names: list[str]) -> list[Layer]:
    for name in names:
        if name not in LAYER_OF:
            fail(f"{name!r} is no harness: use {', '.join(LAYER_OF)}", 2)
    return [LAYER_OF[name] for name in names]
