"""Sessions of a Python harness forked from a warm process inside one container for all of them.

Each session is a user of its own in the container, with directories that no other user reads.
Sessions share the image, the loopback (each reaches the URLs of all running sessions, and needs the
key of its own) and the container's limits. Tasks whose files lie in the image need a container of
their own each.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

import msgspec

from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import (
    Captured,
    Launch,
    LaunchRefused,
    Place,
    ProcessResult,
    Role,
    SandboxLost,
    SandboxRequest,
)
from bridle.harnesses.sandboxes.container.engine import Engine
from bridle.harnesses.sandboxes.container.layers import MOUNTED
from bridle.harnesses.sandboxes.container.sandbox import (
    SCRIPTS,
    SOCKETS,
    ContainerProvider,
    ContainerSandbox,
)
from bridle.harnesses.sandboxes.forked import Zygote
from bridle.harnesses.sandboxes.spec import ContainerSpec

_ZYGOTE: Final = Path(__file__).resolve().parents[1] / "zygote.py"
_ZYGOTE_INSIDE: Final = "/opt/bridle-zygote.py"
_OUT: Final = PurePosixPath("/run/bridle-out")
_SESSIONS: Final = PurePosixPath("/sessions")
_FIRST_UID: Final = 20_000
_START_S: Final = 120.0


@dataclass(slots=True)
class _Warm:
    """A container, its warm process, and the numbers that sessions have in it."""

    sandbox: ContainerSandbox
    zygote: Zygote
    out: Path
    taken: set[int]

    def take(self) -> int:
        number = next(n for n in itertools.count() if n not in self.taken)
        self.taken.add(number)
        return number


class WarmContainerProvider:
    """Opens sessions in one warm container per image.

    ``preload``, ``fresh`` and ``environment`` are those of
    :class:`bridle.harnesses.sandboxes.forked.ForkedProvider`.
    """

    def __init__(
        self,
        harness: str,
        preload: Sequence[str],
        *,
        fresh: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        engine: Engine | None = None,
    ) -> None:
        self._containers = ContainerProvider(harness, engine)
        self._preload, self._fresh = tuple(preload), tuple(fresh)
        self._environment = dict(environment)
        self._warm: dict[bytes, _Warm] = {}
        self._starting = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def open(self, request: SandboxRequest) -> AsyncIterator[WarmSession]:
        warm = await self._get(request)
        number = warm.take()
        relay, uid = warm.sandbox.relay, _FIRST_UID + number
        root = _SESSIONS / str(number)
        place = _place_at(root, warm.sandbox.place)
        relay.allow(request.urls.values())
        try:
            paths = [str(path) for path in (root, place.workspace, place.home, place.logs)]
            await relay.command({"do": "make", "uid": uid, "paths": paths})
            yield WarmSession(warm, request, place, uid)
        finally:
            relay.disallow(request.urls.values())
            ending = {"do": "kill", "signal": int(signal.SIGKILL), "uid": uid}
            await asyncio.shield(relay.command(ending))
            await asyncio.shield(relay.command({"do": "remove", "path": str(root)}))
            warm.taken.discard(number)

    def expected_place(self, request: SandboxRequest) -> Place:
        return _place_at(_SESSIONS / "0", self._containers.expected_place(request))

    async def close(self) -> None:
        await self._stack.aclose()
        self._warm.clear()
        await self._containers.close()

    async def _get(self, request: SandboxRequest) -> _Warm:
        key = msgspec.json.encode(request.container)
        async with self._starting:
            warm = self._warm.get(key)
            if warm is None or warm.zygote.lost or warm.sandbox.relay.lost.is_set():
                warm = self._warm[key] = await self._start(request)
        return warm

    async def _start(self, request: SandboxRequest) -> _Warm:
        made = Path(tempfile.mkdtemp(prefix="bridle-sandboxes-"))
        self._stack.callback(shutil.rmtree, made, ignore_errors=True)
        out = made / "out"
        out.mkdir(mode=0o700)
        spec = request.container or ContainerSpec()
        if spec.services:
            raise LaunchRefused(
                "a task with services needs a container of its own: "
                "use --set agent.sandbox=container"
            )
        program = shutil.copy(_ZYGOTE, made)
        mounts = ("-v", f"{program}:{_ZYGOTE_INSIDE}:ro", "-v", f"{out}:{_OUT}")
        opening = self._containers.open(
            SandboxRequest(made, request.urls, replace(spec, pids=max(spec.pids, 4096))), mounts
        )
        sandbox = await self._stack.enter_async_context(opening)
        words = {"PYTHONPATH": f"{MOUNTED}/packages", **self._environment}
        variables = [part for name, value in words.items() for part in ("-e", f"{name}={value}")]
        await sandbox.engine.check(
            *("exec", "-d", "--user", "0:0", *variables, sandbox.name),
            *(f"{MOUNTED}/bin/python3", str(SCRIPTS / "warm.py"), _ZYGOTE_INSIDE),
            *(str(SOCKETS / "relay"), ",".join(self._fresh), *self._preload),
        )
        try:
            reader, writer = await asyncio.wait_for(sandbox.relay.zygote, _START_S)
            zygote = Zygote(reader, writer)
            await asyncio.wait_for(zygote.greet(), _START_S)
        except TimeoutError as error:
            raise SandboxLost(f"the warm process did not start in {_START_S:g} s") from error
        self._stack.push_async_callback(zygote.close)
        return _Warm(sandbox, zygote, out, set())


class WarmSession(ContainerSandbox):
    """A session whose agent is forked from its container's warm process."""

    def __init__(self, warm: _Warm, request: SandboxRequest, place: Place, uid: int) -> None:
        shared = warm.sandbox
        super().__init__(
            shared.engine, shared.name, place, shared.relay, request, shared.port, f"{uid}:{uid}"
        )
        self._warm = warm
        self._user = {"uid": uid, "gid": uid}

    async def exec(self, launch: Launch) -> ProcessResult:
        if launch.role != "agent":
            return await super().exec(launch)
        if not launch.argv[0].startswith(str(MOUNTED / "bin")):
            raise NotLaunchable(
                f"a forked container runs Python harnesses, not {launch.argv[0]}: "
                "use --set agent.sandbox=container"
            )
        directory = launch.directory or self.place.workspace
        uid = self._user["uid"]
        names = {role: f"{uid}.{role}" for role in ("stdout", "stderr")}
        started = time.monotonic()
        child = self._warm.zygote.fork(
            {
                "argv": list(launch.argv),
                "cwd": str(directory),
                "env": {**launch.environment, "PWD": str(directory)},
                "uid": uid,
                **{stream: str(_OUT / name) for stream, name in names.items()},
            }
        )
        code: int | None
        try:
            code = await asyncio.wait_for(child.wait(), launch.timeout_s)
            code = code if code >= 0 else 128 - code
        except TimeoutError:
            child.signal_group(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), launch.grace_s)
            code = None
        finally:
            await asyncio.shield(self._end_session())
        seconds = time.monotonic() - started
        logs = self.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for stream, name in names.items():
            shutil.move(self._warm.out / name, logs / f"agent.{stream}")
        return ProcessResult(
            code, seconds, Captured.of(logs / "agent.stdout"), Captured.of(logs / "agent.stderr")
        )

    def _user_for(self, role: Role) -> str:
        return f"{self._user['uid']}:{self._user['gid']}"

    async def _end_all(self, grace_s: float, report: asyncio.Future[dict[str, Any]]) -> None:
        """End the processes of this session, not those of the container's other sessions."""
        await self._end_session()

    async def _end_session(self) -> None:
        ending = {"do": "kill", "signal": int(signal.SIGKILL), "uid": self._user["uid"]}
        await self._warm.sandbox.relay.command(ending)


def _place_at(root: PurePosixPath, shared: Place) -> Place:
    return replace(shared, workspace=root / "workspace", home=root / "home", logs=root / "logs")
