"""Runs the tests of a Harbor task and reads its rewards, as Harbor's own verifier does.

Source: harbor 0.26, ``harbor/verifier/verifier.py`` and ``harbor/trial/``. The exit code of
``test.sh`` is ignored; only the reward file counts, and a missing one is an error, not a zero.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from bridle.harnesses.sandboxes.base import Launch, Sandbox
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
from bridle.harnesses.verifiers import Delivery, NoVerdict, Scores, VerifierError

TESTS: Final = PurePosixPath("/tests")
REWARDS: Final = PurePosixPath("/logs/verifier")
ARTIFACTS: Final = PurePosixPath("/logs/artifacts")
_PREPARE_S: Final = 120.0
_PREPARE: Final = """
rm -f {rewards}/reward.txt {rewards}/reward.json
mkdir -p {rewards} {artifacts} && chmod 777 {rewards} {artifacts}
chmod +x {script} 2>/dev/null
"""
_TIDY: Final = f"rm -rf {TESTS} {REWARDS}"


@dataclass(frozen=True, slots=True)
class HarborVerifier:
    """Scores a session on a task whose payload names its Harbor folder."""

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
    """One verification."""

    folder: Path
    config: HarborConfig
    step: StepTable | None
    table: VerifierTable
    delivery: Delivery

    async def shared(self) -> Scores:
        """In the agent's container; what the tests brought is removed afterwards."""
        sandbox = self.delivery.sandbox
        scores = await self._verify(sandbox, self._test_folders())
        await self._root(sandbox, _TIDY)
        return scores

    async def separate(self) -> Scores:
        """In a container of its own, to which only artifacts cross."""
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
        """The build folder of the separate container, and whether it brings the tests itself."""
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
        """Copies artifacts to this machine; a directory of theirs each, with where it came from."""
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
                (local / path.name).write_bytes(data)
                found.append((path.parent, local))
        return found

    def _test_folders(self) -> list[Path]:
        """Folders that become ``/tests``, the task's before the step's."""
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
    """The rewards in ``reward.json``, else the number in ``reward.txt``.

    Raises :class:`NoVerdict` when there is none, or one that is no finite number.
    """
    table, number = folder / "reward.json", folder / "reward.txt"
    file = table if table.is_file() else number
    if not file.is_file():
        raise NoVerdict(f"the tests left no reward file; see {shlex.quote(str(folder))}")
    data = file.read_bytes()
    if not data.strip():
        raise NoVerdict(f"the tests left an empty {file.name}")
    try:
        found: Any = msgspec.json.decode(data) if file is table else {"reward": float(data)}
    except ValueError as error:
        raise NoVerdict(f"{file.name} cannot be read: {error}") from error
    named = found if isinstance(found, dict) else {"reward": found}
    for name, value in named.items():
        numeric = isinstance(value, int | float)
        if not numeric or not math.isfinite(value):
            raise NoVerdict(f"{file.name} has {value!r} as {name}, which is no finite number")
    return {name: float(value) for name, value in named.items()}


def _user(name: str | int | None) -> str | None:
    return None if name is None else str(name)
