"""The verifier that runs the tests of a Harbor task and reads its rewards, as Harbor's own does.

Source: harbor 0.26, ``harbor/verifier/verifier.py`` and ``harbor/trial/``. The exit code of
``test.sh`` is ignored. Only the reward file counts, and a missing one is an error, not a zero.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from bridle.harnesses.sandboxes.base import Launch, Sandbox
from bridle.harnesses.sandboxes.leftovers import RESULT_BYTES, new_file, read_file
from bridle.harnesses.tasks.harbor.config import (
    AgentTable,
    HarborConfig,
    StepTable,
    VerifierTable,
    container_of,
    read_config,
    resolved,
    sources,
)
from bridle.harnesses.tasks.task import TaskError
from bridle.harnesses.verifiers.delivery import Delivery, NoVerdict, Scores, VerifierError
from bridle.store.declaration import SHORT_TEXT

TESTS: Final = PurePosixPath("/tests")
REWARDS: Final = PurePosixPath("/logs/verifier")
ARTIFACTS: Final = PurePosixPath("/logs/artifacts")
_PREPARE_S: Final = 120.0
_MOST_REWARDS: Final = 256
_PREPARE: Final = """
rm -f {rewards}/reward.txt {rewards}/reward.json
mkdir -p {rewards} {artifacts} && chmod 777 {rewards} {artifacts}
chmod +x {script} 2>/dev/null
"""
_TIDY: Final = f"rm -rf {TESTS} {REWARDS}"


@dataclass(frozen=True, slots=True)
class HarborVerifier:
    """A verifier of sessions on a task whose payload names its Harbor folder."""

    async def __call__(self, delivery: Delivery) -> Scores:
        folder = Path(str(delivery.task.payload["harbor"]))
        try:
            config = read_config(folder)
            step = config.step(delivery.task.payload.get("step"))
            table = config.verifier_for(step)
            run = _Run(folder, config, step, table, delivery)
            return await (run.separate() if table.mode == "separate" else run.shared())
        except TaskError as error:
            raise NoVerdict(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Run:
    folder: Path
    config: HarborConfig
    step: StepTable | None
    table: VerifierTable
    delivery: Delivery

    async def shared(self) -> Scores:
        """Verify in the agent's container, and remove the files of the tests afterwards."""
        sandbox = self.delivery.sandbox
        scores = await self._verify(sandbox, self._test_folders())
        await self._root(sandbox, _TIDY)
        return scores

    async def separate(self) -> Scores:
        """Verify in a container of its own, to which only artifacts are copied."""
        sandbox = self.delivery.sandbox
        for hook in self.table.collect:
            await self._shell(sandbox, hook.command, hook.timeout_sec, _user(hook.user))
        crossing = await self._collect(sandbox)
        build, bundled = self._definition()
        table = self.table.environment or self.config.environment
        if not bundled:
            own = self.config.environment
            table = msgspec.structs.replace(table, docker_image=own.docker_image)
        spec = container_of(build, table, AgentTable())
        async with self.delivery.open_another(spec) as fresh:
            for path, local in crossing:
                await fresh.upload(local, path)
            return await self._verify(fresh, [] if bundled else self._test_folders())

    def _definition(self) -> tuple[Path, bool]:
        """Return the build folder of the separate container.

        Return also whether its image contains the tests.
        """
        candidates = []
        if self.step is not None:
            own = self.step.verifier.environment
            candidates.append((own, self.folder / "steps" / self.step.name / "tests"))
        candidates.append((self.config.verifier.environment, self.folder / "tests"))
        for table, directory in candidates:
            if (table and table.docker_image) or (directory / "Dockerfile").is_file():
                return directory, True
        return self.folder / "environment", False

    async def _collect(self, sandbox: Sandbox) -> list[tuple[PurePosixPath, Path]]:
        """Copy artifacts to this machine.

        Return each one's path in the container and its local directory.
        """
        entries = (*self.config.artifacts, *(self.step.artifacts if self.step else ()))
        found = []
        for number, source in enumerate(dict.fromkeys((str(ARTIFACTS), *sources(entries)))):
            path = PurePosixPath(sandbox.place.workspace) / source
            local = sandbox.directory / "artifacts" / str(number)
            try:
                await sandbox.download(path, local)
                found.append((path, local))
            except FileNotFoundError:
                try:
                    data = await sandbox.read(path)
                except FileNotFoundError:
                    continue  # As in Harbor: the tests decide what a missing artifact means.
                local.mkdir(parents=True, exist_ok=True)
                with new_file(local / path.name) as file:
                    file.write(data)
                found.append((path.parent, local))
        return found

    def _test_folders(self) -> list[Path]:
        """Return the folders that become ``/tests``, the task's before the step's."""
        folders = [self.folder / "tests"]
        if self.step is not None:
            folders.append(self.folder / "steps" / self.step.name / "tests")
        found = [folder for folder in folders if folder.is_dir()]
        if not any((folder / "test.sh").is_file() for folder in found):
            raise TaskError(f"{self.folder} has no tests/test.sh")
        return found

    async def _verify(self, sandbox: Sandbox, tests: list[Path]) -> Scores:
        for folder in tests:
            await sandbox.upload(folder, TESTS)
        script = TESTS / "test.sh"
        await self._root(
            sandbox, _PREPARE.format(rewards=REWARDS, artifacts=ARTIFACTS, script=script)
        )
        command = f"({script}) > {REWARDS}/test-stdout.txt 2>&1"
        timeout_s = self.table.timeout_sec
        await self._shell(sandbox, command, timeout_s, _user(self.table.user))
        local = sandbox.directory / "verifier" / (self.step.name if self.step else "")
        try:
            await sandbox.download(REWARDS, local)
        except FileNotFoundError as error:
            raise NoVerdict(f"the tests removed {REWARDS}") from error
        return rewards_in(local)

    async def _shell(
        self, sandbox: Sandbox, command: str, timeout_s: float, user: str | None
    ) -> None:
        environment = {**sandbox.place.environment, **resolved(self.table.env)}
        launch = Launch(
            ("/bin/sh", "-c", command), environment, timeout_s, role="verifier", user=user
        )
        if (await sandbox.exec(launch)).timed_out:
            raise NoVerdict(f"the verifier took more than {timeout_s:g} s")

    async def _root(self, sandbox: Sandbox, script: str) -> None:
        environment = sandbox.place.environment
        launch = Launch(
            ("/bin/sh", "-c", script),
            environment,
            _PREPARE_S,
            role="setup",
            directory=PurePosixPath("/"),
            user="root",
        )
        if (await sandbox.exec(launch)).timed_out:
            raise VerifierError("the sandbox cannot be prepared for the tests")


def rewards_in(folder: Path) -> Scores:
    """Return the rewards in ``reward.json``, or else the number in ``reward.txt``.

    Raise :class:`NoVerdict` if there is none, or if one is not a finite number.
    """
    table, number = folder / "reward.json", folder / "reward.txt"
    file = table if os.path.lexists(table) else number
    try:
        data = read_file(folder, file, RESULT_BYTES)
    except FileNotFoundError as error:
        raise NoVerdict(
            f"the tests left no reward file of at most {RESULT_BYTES} bytes; see "
            f"{shlex.quote(str(folder))}"
        ) from error
    if not data.strip():
        raise NoVerdict(f"the tests left an empty {file.name}")
    try:
        found: Any = (
            msgspec.json.decode(data) if file is table else {"reward": float(data.decode())}
        )
    except (ValueError, RecursionError) as error:
        raise NoVerdict(f"{file.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise NoVerdict(f'{file.name} is no object of rewards, such as {{"reward": 1.0}}')
    named: dict[str, Any] = found
    if len(named) > _MOST_REWARDS or any(not 0 < len(name) <= SHORT_TEXT for name in named):
        raise NoVerdict(
            f"{file.name} has {len(named)} rewards: at most {_MOST_REWARDS}, with names of 1 to "
            f"{SHORT_TEXT} characters, are read"
        )
    return {name: _finite(file.name, name, value) for name, value in named.items()}


def _finite(file: str, name: str, value: object) -> float:
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    raise NoVerdict(f"{file} has {ascii(value)[:100]} as {name}, which is no finite number")


def _user(name: str | int | None) -> str | None:
    return None if name is None else str(name)
