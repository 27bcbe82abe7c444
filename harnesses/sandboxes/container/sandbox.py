"""A container per session: its place, its processes, and the provider that makes and removes it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import secrets
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import (
    Captured,
    DirectoryGone,
    Launch,
    LaunchRefused,
    Place,
    ProcessResult,
    Role,
    SandboxLost,
    SandboxRequest,
)
from bridle.harnesses.sandboxes.container.archives import extract, opened, owned_by_root
from bridle.harnesses.sandboxes.container.engine import OWNER, Engine, Finished, owner_label
from bridle.harnesses.sandboxes.container.images import Image, Images
from bridle.harnesses.sandboxes.container.layers import (
    LAYER_OF,
    MOUNTED,
    MountedPrograms,
    install,
)
from bridle.harnesses.sandboxes.container.services import Services
from bridle.harnesses.sandboxes.leftovers import COPY_BYTES, READ_BYTES
from bridle.harnesses.sandboxes.relay import Relay
from bridle.harnesses.sandboxes.spec import ContainerSpec

log = logging.getLogger(__name__)

_INSIDE: Final = Path(__file__).resolve().with_name("inside")
_LEFTOVERS: Final = Path(__file__).resolve().parents[1] / "leftovers.py"
SCRIPTS: Final = PurePosixPath("/opt/bridle-inside")
SOCKETS: Final = PurePosixPath("/run/bridle")
_SHARED: Final = ("/logs/verifier", "/logs/artifacts")
"""Directories that a task's tests may expect, as Harbor's do."""
_EGRESS_PORT: Final = 3128
_START_S: Final = 120.0
_DRAIN_S: Final = 0.5
"""Seconds of waiting for output when a process has ended and one that it left holds the stream."""
_STORAGE_EVERY_S: Final = 2.0
_MISSING: Final = 44
"""The exit code of ``inside/pack.py`` for a path at which there is nothing that is copied."""
_TOO_LONG: Final = 7
"""The number of the error E2BIG."""


class ContainerSandbox:
    """One session's container."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        place: Place,
        relay: Relay,
        request: SandboxRequest,
        port: int,
        image_user: str,
    ) -> None:
        self.engine = engine
        self.name = name
        self._place = place
        self.relay = relay
        self._directory = request.directory
        self._spec = request.container or ContainerSpec()
        self.port = port
        self._image_user = image_user
        self._user = {"uid": 0, "gid": 0}

    @property
    def place(self) -> Place:
        return self._place

    @property
    def directory(self) -> Path:
        return self._directory

    def url(self, url: str) -> str:
        """Return ``url`` at the port of the loopback that leads to the relay."""
        return urlsplit(url)._replace(scheme="http", netloc=f"127.0.0.1:{self.port}").geturl()

    async def ready(self) -> None:
        """Wait for the first process. Raise :class:`SandboxLost`."""
        deadline = time.monotonic() + _START_S
        while not self.relay.ready.done() and time.monotonic() < deadline:
            await asyncio.wait({self.relay.ready}, timeout=1.0)
            if not self.relay.ready.done() and not await self._runs():
                break
        if not self.relay.ready.done():
            logs = await self.engine.run("logs", "--tail", "5", self.name)
            raise SandboxLost(f"the container did not start: {logs.error}")
        self._user = self.relay.ready.result()

    async def _runs(self) -> bool:
        found = await self.engine.run("inspect", "-f", "{{.State.Running}}", self.name)
        return found.out.strip() == b"true"

    async def exec(self, launch: Launch) -> ProcessResult:
        token = secrets.token_hex(12)
        directory = launch.directory or self._place.workspace
        user = launch.user or self._user_for(launch.role)
        logs = self._directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        stdout, stderr = logs / f"{launch.role}.stdout", logs / f"{launch.role}.stderr"
        asked = {
            "argv": launch.argv,
            "env": {**launch.environment, "PWD": str(directory)},
            "cwd": str(directory),
            "token": token,
            "socket": str(SOCKETS / "relay"),
        }
        report = self.relay.expect(token)
        started = time.monotonic()
        try:
            with stdout.open("wb") as out, stderr.open("wb") as err:
                process = await self.engine.start(
                    *("exec", "-i", "--user", user, self.name),
                    *(f"{MOUNTED}/bin/python3", "-I", "-S", str(SCRIPTS / "launch.py")),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                )
                told = await self._ended(process, msgspec.json.encode(asked), report, launch)
        finally:
            self.relay.forget(token)
        seconds = time.monotonic() - started
        code = None if told is None else _exit_code(told, launch)
        return ProcessResult(code, seconds, Captured.of(stdout), Captured.of(stderr))

    def _user_for(self, role: Role) -> str:
        """Return the task's user for the agent, else the image's."""
        if role == "agent":
            return f"{self._user['uid']}:{self._user['gid']}"
        return self._image_user or "root"

    async def _ended(
        self,
        process: asyncio.subprocess.Process,
        asked: bytes,
        report: asyncio.Future[dict[str, Any]],
        launch: Launch,
    ) -> dict[str, Any] | None:
        """Return the launcher's report, or ``None`` if the time was up."""
        over: asyncio.Future[Any] = asyncio.create_task(process.wait())
        lost: asyncio.Future[Any] = asyncio.create_task(self.relay.lost.wait())
        full: asyncio.Future[Any] = asyncio.create_task(self._over_storage())
        watched = {over, lost, full, report}
        try:
            await _send(process, asked + b"\n")
            await asyncio.wait(
                watched, timeout=launch.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if over.done() and not report.done():
                # The report may still be under way.
                await asyncio.wait({report, lost}, timeout=_DRAIN_S)
            if report.done():
                await asyncio.wait({over}, timeout=_DRAIN_S)
                return report.result()
            if not lost.done() and process.returncode == 128 + signal.SIGKILL:
                # The container is there: a process of its own killed all of its user's.
                return {"code": -signal.SIGKILL}
            if lost.done() or over.done():
                raise SandboxLost(f"the container was lost while the {launch.role} ran")
            await self._end_all(launch.grace_s, report)
            return {"code": -signal.SIGKILL} if full.done() else None
        except asyncio.CancelledError:
            await asyncio.shield(self._end_all(0.0, report))
            raise
        finally:
            for task in (over, lost, full):
                task.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _end_all(self, grace_s: float, report: asyncio.Future[dict[str, Any]]) -> None:
        if grace_s:
            await self.relay.signal_all(signal.SIGTERM)
            await asyncio.wait({report}, timeout=grace_s)
        await self.relay.signal_all(signal.SIGKILL)

    async def _over_storage(self) -> None:
        """Return when the container has written more than it may; without a limit, never."""
        limit = self._spec.storage_mb
        while limit is not None:
            await asyncio.sleep(_STORAGE_EVERY_S)
            arguments = ("inspect", "--size", "-f", "{{.SizeRw}}", self.name)
            finished = await self.engine.run(*arguments)
            if finished.code == 0 and int(finished.out or 0) > limit << 20:
                return
        await asyncio.get_running_loop().create_future()

    async def read(self, path: PurePath) -> bytes:
        archive = await self._archive("file", path, READ_BYTES)
        with archive, opened(archive) as tar:
            member = tar.next()
            file = tar.extractfile(member) if member and member.isreg() else None
            if file is None or tar.next() is not None:
                raise FileNotFoundError(f"no plain file {path}")
            return file.read()

    async def write(self, files: Mapping[PurePath, str | bytes]) -> None:
        roots = (self._place.workspace, self._place.home, self._place.logs)
        buffer = io.BytesIO()
        known: set[PurePath] = set()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path, content in files.items():
                _require_name(path)
                try:
                    data = content.encode() if isinstance(content, str) else content
                except UnicodeEncodeError as error:
                    raise LaunchRefused(f"cannot write the file {str(path)!r}: {error}") from error
                for above in reversed(path.parents):
                    inside = any(above != root and above.is_relative_to(root) for root in roots)
                    if inside and above not in known:
                        known.add(above)
                        tar.addfile(self._entry(above, tarfile.DIRTYPE, 0o755))
                if path in known:
                    raise LaunchRefused(f"cannot write the file {str(path)!r}: it is a directory")
                known.add(path)
                entry = self._entry(path, tarfile.REGTYPE, 0o644, len(data))
                tar.addfile(entry, io.BytesIO(data))
        if files:
            await self._unpack(buffer.getvalue(), ", ".join(str(path) for path in files))

    async def upload(self, source: Path, target: PurePath) -> None:
        with tempfile.TemporaryFile() as buffer:
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                tar.add(source, str(target).lstrip("/"), filter=owned_by_root)
            buffer.seek(0)
            await self.engine.check(
                *self.engine.copy_in, f"{self.name}:/", data=buffer, limit_s=600
            )

    async def download(self, source: PurePath, target: Path) -> None:
        archive = await self._archive("folder", source, COPY_BYTES)
        await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
        with archive, opened(archive) as tar:
            await asyncio.to_thread(extract, tar, target)

    def _entry(self, path: PurePath, kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(str(path).lstrip("/"))
        entry.type, entry.mode, entry.size, entry.mtime = kind, mode, size, int(time.time())
        entry.uid, entry.gid = self._user["uid"], self._user["gid"]
        return entry

    async def _unpack(self, archive: bytes, named: str) -> None:
        finished = await self.engine.run(*self.engine.copy_in, f"{self.name}:/", data=archive)
        if finished.code:
            if self.relay.lost.is_set():
                raise SandboxLost("the container is gone")
            raise LaunchRefused(f"cannot write the file {named}: {finished.error}")

    async def _archive(self, kind: str, path: PurePath, most: int) -> Any:
        """Return an open archive of a ``folder`` or ``file`` with at most ``most`` bytes of files.

        Raise :class:`FileNotFoundError` if there is none.
        """
        archive = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            finished = await self._pack(kind, path, most, archive)
            if finished.code not in (0, _MISSING):
                # A process in the container may have ended the packer.
                await self._end_all(0.0, asyncio.get_running_loop().create_future())
                archive.truncate(archive.seek(0))
                finished = await self._pack(kind, path, most, archive)
            if finished.code:
                raise FileNotFoundError(finished.error)
        except OSError as error:
            archive.close()
            if self.relay.lost.is_set():
                raise SandboxLost("the container is gone") from error
            raise FileNotFoundError(f"{path} cannot be read: {error}") from error
        if finished.err:
            log.warning("%s", finished.error)
        archive.seek(0)
        return archive

    async def _pack(self, kind: str, path: PurePath, most: int, archive: Any) -> Finished:
        packer = (f"{MOUNTED}/bin/python3", "-I", "-S", str(SCRIPTS / "pack.py"))
        named = ("exec", "--user", "0:0", self.name, *packer, kind, str(path), str(most))
        headers = most // 4 + (1 << 16)
        return await self.engine.save(*named, out=archive, most=most + headers, limit_s=600)


class ContainerProvider:
    """Opens a container for each session, with the layer of one harness mounted into it."""

    def __init__(self, harness: str = "none", engine: Engine | None = None) -> None:
        self._engine = engine or Engine.find()
        self._layer = LAYER_OF.get(harness, LAYER_OF["none"])
        self._images = Images(self._engine)
        self._starting = asyncio.Lock()
        self._sockets: Path | None = None
        self._open: dict[str, Services] = {}

    @contextlib.asynccontextmanager
    async def open(
        self, request: SandboxRequest, mounts: Sequence[str] = ()
    ) -> AsyncIterator[ContainerSandbox]:
        sockets = await self._started()
        spec = request.container or ContainerSpec()
        image = await self._images.get(spec)
        name = f"bridle-{secrets.token_hex(8)}"
        folder = sockets / name
        folder.mkdir()
        relay = Relay(request.urls.values(), spec.allowed_hosts)
        place = _place(self._programs, spec, image)
        port = _port_of(request.urls)
        sandbox = ContainerSandbox(self._engine, name, place, relay, request, port, image.user)
        services = self._open[name] = Services(self._engine, name, spec, folder)
        try:
            await relay.start(folder / "relay")
            arguments = _arguments(spec, image, place, folder, port)
            made = await self._engine.run(
                *("run", "-d", "--name", name, "--label", f"{OWNER}={owner_label()}"),
                *("-v", f"{self._layer.volume}:{MOUNTED}:ro", *mounts, *arguments),
                limit_s=_START_S,
            )
            if made.code:
                raise SandboxLost(f"cannot start a container of {image.name}: {made.error}")
            await sandbox.ready()
            if spec.services:
                await services.up(self._images)
            await _until_healthy(sandbox, spec)
            yield sandbox
        finally:
            await asyncio.shield(self._remove(name, relay, folder))

    def expected_place(self, request: SandboxRequest) -> Place:
        spec = request.container or ContainerSpec()
        return _place(self._programs, spec, Image("", {}, "", ""))

    async def close(self) -> None:
        for name, services in tuple(self._open.items()):
            await services.down()
            await self._engine.run("rm", "-f", "-v", name)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None

    @property
    def _programs(self) -> MountedPrograms:
        return MountedPrograms(self._layer)

    async def _started(self) -> Path:
        """Remove what dead owners left, install the layer and make the folder of sockets, once."""
        async with self._starting:
            if self._sockets is None:
                await self._engine.sweep()
                await install(self._engine, self._layer)
                self._sockets = Path(tempfile.mkdtemp(prefix="bridle-sandboxes-"))
                # All that the engine mounts lies below TMPDIR, which it may share with a container.
                scripts = Path(shutil.copytree(_INSIDE, self._sockets / _INSIDE.name))
                shutil.copy(_LEFTOVERS, scripts)
            return self._sockets

    async def _remove(self, name: str, relay: Relay, folder: Path) -> None:
        try:
            await self._open[name].down()
        finally:
            removed = await self._engine.run("rm", "-f", "-v", name)
            if removed.code == 0 or b"No such container" in removed.err:
                self._open.pop(name, None)
            await relay.close()
            shutil.rmtree(folder, ignore_errors=True)


def _place(programs: MountedPrograms, spec: ContainerSpec, image: Image) -> Place:
    environment = {**image.environment, **spec.environment}
    if spec.network == "allowlist":
        url = f"http://127.0.0.1:{_EGRESS_PORT}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        environment |= dict.fromkeys(names, url)
        environment |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost,::1")
    return Place(
        PurePosixPath(spec.workdir or image.workdir or "/workspace"),
        PurePosixPath("/home/bridle"),
        PurePosixPath("/logs/agent"),
        environment,
        programs,
    )


def _port_of(urls: Mapping[str, str]) -> int:
    """Return the proxy's own port, so that URLs of a session on this machine stay as they are."""
    return next((urlsplit(url).port or 8484 for url in urls.values() if url), 8484)


def _arguments(
    spec: ContainerSpec, image: Image, place: Place, sockets: Path, port: int
) -> list[str]:
    """Return the arguments after ``run`` for a session's container."""
    listen = {"session": port}
    if spec.network == "allowlist":
        listen["egress"] = _EGRESS_PORT
    settings = {
        "socket": str(SOCKETS / "relay"),
        "user": spec.user or image.user,
        "listen": listen,
        "directories": [str(place.workspace), str(place.home), str(place.logs), *_SHARED],
    }
    limits = {
        "--pids-limit": spec.pids,
        "--cpus": spec.cpus,
        "--memory": spec.memory_mb and f"{spec.memory_mb}m",
        "--memory-swap": spec.memory_mb and f"{spec.memory_mb}m",
        "--gpus": spec.gpus or None,
    }
    arguments = [f"{name}={value}" for name, value in limits.items() if value is not None]
    arguments += ["--network", "bridge" if spec.network == "public" else "none"]
    arguments += [f"--add-host={host}:127.0.0.1" for host in spec.hosts]
    arguments += ["--user", "0:0", "--workdir", "/"]
    scripts = sockets.with_name(_INSIDE.name)
    arguments += ["-v", f"{scripts}:{SCRIPTS}:ro", "-v", f"{sockets}:{SOCKETS}:ro"]
    for inside, outside in spec.mounts.items():
        arguments += ["-v", f"{Path(outside).absolute()}:{inside}:ro"]
    keeper = ["-I", "-S", str(SCRIPTS / "keeper.py"), msgspec.json.encode(settings).decode()]
    return [*arguments, "--entrypoint", f"{MOUNTED}/bin/python3", image.name, *keeper]


async def _until_healthy(sandbox: ContainerSandbox, spec: ContainerSpec) -> None:
    """Raise :class:`SandboxLost` when the task's own check fails as often as it may."""
    health = spec.health
    if health is None:
        return
    await asyncio.sleep(health.start_period_s)
    for attempt in range(max(1, health.retries)):
        if attempt:
            await asyncio.sleep(health.interval_s)
        launch = Launch(
            ("/bin/sh", "-c", health.command),
            sandbox.place.environment,
            health.timeout_s,
            role="setup",
            user="root",
        )
        finished = await sandbox.exec(launch)
        if finished.exit_code == 0:
            return
    raise SandboxLost(f"the container is not healthy: {finished.stderr.tail.strip()[-300:]}")


async def _send(process: asyncio.subprocess.Process, line: bytes) -> None:
    """Write ``line``. The end of a process that is already gone is handled elsewhere."""
    if process.stdin is not None:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(line)
            await process.stdin.drain()


def _exit_code(told: Mapping[str, Any], launch: Launch) -> int:
    """Return the exit code of a launch.

    Raise the error that it reports if the process did not start.
    """
    if told.get("error") == "directory":
        raise DirectoryGone("the directory to start in does not exist")
    if told.get("error") == "start":
        problem = f"cannot start {launch.argv[0]}: {told['why']}"
        refused = told["errno"] in (0, _TOO_LONG)
        raise LaunchRefused(problem) if refused else NotLaunchable(problem)
    code = int(told["code"])
    return code if code >= 0 else 128 - code


def _require_name(path: PurePath) -> None:
    try:
        fits = all(len(part.encode()) < 256 and "\0" not in part for part in path.parts)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise LaunchRefused(f"cannot write the file {str(path)!r}: no file can have this name")
