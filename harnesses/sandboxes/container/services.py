"""The services of one session, started by ``docker compose`` beside the session's container.

They join the network of that container, which has a loopback alone unless the task is public. So
they find each other, and the session finds them, at 127.0.0.1, where the hosts file leads their
names, and the walls are those of the session: no network of the engine is made, through which other
sessions and the machine itself could be reached.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from bridle.harnesses.sandboxes.base import LaunchRefused, SandboxLost
from bridle.harnesses.sandboxes.container.engine import OWNER, Engine, owner_label
from bridle.harnesses.sandboxes.container.images import Images
from bridle.harnesses.sandboxes.spec import ContainerSpec

_START_S: Final = 300.0


class Services:
    """The services of the container ``name``, as a project of compose with the same name."""

    def __init__(self, engine: Engine, name: str, spec: ContainerSpec, folder: Path) -> None:
        """``folder`` is the session's own one, which the engine can mount."""
        self._engine = engine
        self._name = name
        self._spec = spec
        self._folder = folder / "services"

    async def up(self, images: Images) -> None:
        """Start the services and wait until they are healthy.

        Raise :class:`LaunchRefused` without compose or an image, :class:`SandboxLost` if a service
        does not start.
        """
        if (await self._engine.run("compose", "version")).code:
            raise LaunchRefused(
                f"the task has services, and `{self._engine.program} compose` is not installed"
            )
        self._folder.mkdir()
        services = {
            name: await self._definition(name, dict(one), images)
            for name, one in self._spec.services.items()
        }
        label = {OWNER: owner_label()}
        whole = {
            "services": services,
            "volumes": {volume: {"labels": label} for volume in self._spec.volumes},
        }
        # Variables are resolved by the task's own rules, never by compose.
        text = msgspec.json.encode(whole).replace(b"$", b"$$")
        self._file.write_bytes(text)
        started = await self._compose("up", "-d", "--wait", "--no-build", limit_s=_START_S)
        if started:
            logs = await self._engine.run(*self._command, "logs", "--tail", "5", "--no-color")
            shown = logs.out.decode("utf-8", "replace").strip()[-600:]
            raise SandboxLost(f"the task's services do not start: {started}\n{shown}".strip())

    async def down(self) -> None:
        """Remove the services and their volumes, if they were begun."""
        if self._file.exists():
            await self._compose("down", "-v", "--remove-orphans", "-t", "0")

    async def _definition(self, name: str, one: dict[str, Any], images: Images) -> dict[str, Any]:
        asked = ContainerSpec(
            image=one.get("image"),
            build=one.pop("build", None),
            build_timeout_s=self._spec.build_timeout_s,
        )
        one["image"] = (await images.get(asked)).name
        one["volumes"] = [self._mount(name, at, m) for at, m in enumerate(one.get("volumes", ()))]
        if self._spec.memory_mb:
            one["mem_limit"] = f"{self._spec.memory_mb}m"
        return one | {
            "network_mode": f"container:{self._name}",
            "labels": {OWNER: owner_label()},
            "pids_limit": self._spec.pids,
            "restart": "no",
            "security_opt": ["no-new-privileges:true"],
        }

    def _mount(self, name: str, at: int, mount: dict[str, Any]) -> dict[str, Any]:
        """Return a mount whose files lie where the engine can mount them."""
        if mount["type"] != "bind":
            return mount
        source, copy = Path(mount["source"]), self._folder / f"{name}-{at}"
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy(source, copy)
        return mount | {"source": str(copy)}

    @property
    def _file(self) -> Path:
        return self._folder / "compose.json"

    @property
    def _command(self) -> tuple[str, ...]:
        return ("compose", "-p", self._name, "-f", str(self._file))

    async def _compose(self, *arguments: str, limit_s: float = 120.0) -> str:
        """Run a command of compose; return its error, or ``""``."""
        ended = await self._engine.run(*self._command, *arguments, limit_s=limit_s)
        return (ended.error or "an error") if ended.code else ""
