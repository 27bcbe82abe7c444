"""A sandbox on another machine, which is reached over HTTP (``server.py``)."""

from __future__ import annotations

import asyncio
import io
import tarfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import httpx

from bridle.harnesses.adapters.base import Adapter
from bridle.harnesses.install import NotLaunchable
from bridle.harnesses.sandboxes.base import (
    Captured,
    DirectoryGone,
    Launch,
    Place,
    ProcessResult,
    SandboxLost,
    SandboxRequest,
    refuse_container,
)


@dataclass(frozen=True)
class RemoteOptions:
    url: str = "http://127.0.0.1:8765"
    """Base URL of the machine."""


_OPTIONS = RemoteOptions()


class NoPrograms:
    """The machine has none of the pinned harnesses."""

    def node(self, command: str) -> str:
        raise NotLaunchable(f"{command} is not installed on the remote machine")

    def python(self, harness: str, command: str) -> str:
        raise NotLaunchable(f"{harness} is not installed on the remote machine")

    def search_path(self, path: str) -> str:
        return path


def place_at(root: str, name: str) -> Place:
    folder = PurePosixPath(root) / name
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    return Place(folder / "workspace", folder / "home", folder / "logs", environment, NoPrograms())


class RemoteSandbox:
    """One session's folder on the machine."""

    def __init__(self, client: httpx.AsyncClient, place: Place, directory: Path) -> None:
        self._client, self._place, self._directory = client, place, directory

    @property
    def place(self) -> Place:
        return self._place

    @property
    def directory(self) -> Path:
        return self._directory

    def url(self, url: str) -> str:
        return url

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return await self._client.request(method, path, **more)
        except httpx.TransportError as error:
            raise SandboxLost(f"the machine {self._client.base_url} is gone: {error}") from error

    async def exec(self, launch: Launch) -> ProcessResult:
        number = uuid.uuid4().hex
        asked = {
            "id": number,
            "argv": launch.argv,
            "environment": dict(launch.environment),
            "directory": str(launch.directory or self._place.workspace),
            "timeout_s": launch.timeout_s,
        }
        try:
            found = (await self.ask("POST", "/exec", json=asked, timeout=None)).json()
        except asyncio.CancelledError:
            await asyncio.shield(self.ask("POST", "/kill", json={"id": number}))
            raise
        if "gone" in found:
            raise DirectoryGone(f"{found['gone']} is no directory")
        if "refused" in found:
            raise NotLaunchable(found["refused"])
        outputs = self._directory / "outputs"
        outputs.mkdir(parents=True, exist_ok=True)
        streams = {}
        for stream in ("stdout", "stderr"):
            path = outputs / f"{launch.role}.{stream}"
            path.write_bytes(found[stream].encode("latin-1"))
            streams[stream] = Captured.of(path)
        return ProcessResult(found["exit_code"], found["seconds"], **streams)

    async def read(self, path: PurePath) -> bytes:
        reply = await self.ask("GET", "/file", params={"path": str(path)})
        if reply.status_code != 200:
            raise FileNotFoundError(str(path))
        return reply.content

    async def write(self, files: Mapping[PurePath, str | bytes]) -> None:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            await self.ask("PUT", "/file", params={"path": str(path)}, content=data)

    async def upload(self, source: Path, target: PurePath) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source, ".")
        await self.ask("PUT", "/folder", params={"path": str(target)}, content=packed.getvalue())

    async def download(self, source: PurePath, target: Path) -> None:
        reply = await self.ask("GET", "/folder", params={"path": str(source)})
        if reply.status_code != 200:
            raise FileNotFoundError(str(source))
        await asyncio.to_thread(unpack, reply.content, target)


def unpack(packed: bytes, target: Path) -> None:
    """Write the content of a packed folder into a folder, which is made."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")


class RemoteProvider:
    """Opens sandboxes on the machine at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def open(self, request: SandboxRequest) -> AsyncIterator[RemoteSandbox]:
        place = self._place(request, uuid.uuid4().hex[:12])
        async with httpx.AsyncClient(base_url=self._url, trust_env=False) as client:
            sandbox = RemoteSandbox(client, place, request.directory)
            request.directory.mkdir(parents=True, exist_ok=True)
            empty = request.directory / "empty"
            empty.mkdir()
            for folder in (place.workspace, place.home, place.logs):
                await sandbox.upload(empty, folder)
            try:
                yield sandbox
            finally:
                await sandbox.ask("DELETE", "/folder", params={"path": str(place.workspace.parent)})

    def expected_place(self, request: SandboxRequest) -> Place:
        return self._place(request, "session")

    def _place(self, request: SandboxRequest, name: str) -> Place:
        refuse_container(request, "remote")
        try:
            root = httpx.get(f"{self._url}/root", trust_env=False).text
        except httpx.TransportError as error:
            raise NotLaunchable(
                f"no machine answers at {self._url}: start one, and name it by "
                "--set agent.options.remote.url=URL"
            ) from error
        return place_at(root, name)

    async def close(self) -> None:
        """Do nothing: a session's folder goes with its sandbox."""


def remote(adapter: Adapter, options: RemoteOptions = _OPTIONS) -> RemoteProvider:
    """Return the provider of sandboxes on the machine that ``options`` name."""
    return RemoteProvider(options.url)
