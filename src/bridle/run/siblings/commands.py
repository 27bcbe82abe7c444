"""Siblings of a session of ``bridle run``: its command is started again, in copies of its folder.

Each copy stands in the folder's place, at the recorded path, so that several siblings run at once
and none sees the work of another.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Self

from bridle.harnesses.adapters import Configurable, configurable
from bridle.harnesses.client import Client, Session, SessionRequest
from bridle.harnesses.environment import redirected
from bridle.harnesses.run import launch_variables, seal_session
from bridle.harnesses.started import REMOVED, how_started, installed_version, workspace_commit
from bridle.run.siblings.copies import copied
from bridle.run.siblings.recording import Entry, NotReentrant, Recording, Sibling, Siblings

CHECK = "check"
"""Name of the reward of a command that checks a sibling's work."""


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    """The recorded start of a session, which is known to be possible here."""

    argv: Sequence[str]
    known: Configurable | None
    """The harness, if it was configured for its session."""
    folder: Path
    places: Mapping[str, str]
    """The recorded variables ``HOME`` and ``TZ``."""
    session: Mapping[str, Any]

    @classmethod
    def of(cls, recording: Recording) -> Self:
        """Return the start of a recorded session. Raise :class:`NotReentrant`."""
        session = recording.session
        argv, folder, home = (
            session["argv"],
            Path(session["folder"] or os.getcwd()),
            session["home"],
        )
        if not argv:
            raise NotReentrant(
                f"session {recording.id} has no command: record the agent with `bridle run -- …`, "
                "then its session can be replayed"
            )
        if any(REMOVED in word for word in argv):
            raise NotReentrant(
                f"the command of session {recording.id} held a secret, which is not recorded"
            )
        if not Path(argv[0]).is_file():
            raise NotReentrant(f"the command of session {recording.id} is no longer at {argv[0]}")
        for place in (folder, *([Path(home)] if home else [])):
            # The agent sees its name.
            if not place.is_dir():
                raise NotReentrant(
                    f"the session ran in {place}, which is not there; make it again, or link it"
                )
        known = configurable(PurePath(argv[0]).name)
        own = known if known is not None and known.name == session["harness"] else None
        variables = {"HOME": home, "TZ": session["tz"]}
        places = {name: value for name, value in variables.items() if value is not None}
        return cls(argv, own, folder, places, session)

    def changes(self) -> list[str]:
        """Return what is known to differ from the recorded start."""
        now = {
            "harness_version": ("the harness's version", installed_version(self.argv[0])),
            "workspace_commit": ("the folder's Git commit", workspace_commit(str(self.folder))),
        }
        return [
            f"{what} was {self.session[name]}, now {value}"
            for name, (what, value) in now.items()
            if self.session[name] is not None and self.session[name] != value
        ]

    def request(self, entry: Entry) -> SessionRequest:
        return SessionRequest(
            group_id=entry.group_id or self.session["group_id"],
            harness=self.session["harness"],
            settings={"replay": dict(entry.rules)},
            start=replace(
                how_started(self.argv, str(self.folder), {**os.environ, **self.places}),
                harness_version=installed_version(self.argv[0]),
                workspace_commit=workspace_commit(str(self.folder)),
            ),
            origin=entry.origin,
        )


class CommandSiblings(Siblings):
    """Starts the command of a recorded session again, without a terminal."""

    def __init__(
        self,
        proxy: str,
        key: str | None,
        command: RecordedCommand,
        *,
        parallel: int = 4,
        check: str | None = None,
        commit: str | None = None,
    ) -> None:
        """``check`` is a shell command; its exit status 0 in a sibling's folder is success.

        Each copy of the folder is reset to ``commit``, if there is one.
        """
        self._proxy, self._key = proxy, key
        self._command = command
        self._parallel = parallel
        self._check = check
        self._commit = commit
        self._running: set[subprocess.Popen[str]] = set()
        self._ending = threading.Event()

    def run(self, entry: Entry, count: int) -> Generator[Sibling]:
        self._ending.clear()
        with ThreadPoolExecutor(self._parallel, "sibling") as pool:
            waiting = [pool.submit(self._one, entry) for _ in range(count)]
            try:
                for future in as_completed(waiting):
                    yield future.result()
            except BaseException:
                self._ending.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.terminate()
                raise

    def _one(self, entry: Entry) -> Sibling:
        command, session = self._command, self._created(entry)
        code = None
        with (
            launch_variables(session, command.argv, command.known, command.places) as variables,
            copied(command.folder, self._commit) as prefix,
        ):
            try:
                code, stdout, stderr = self._launched([*prefix, *command.argv], variables)
                reward = None
                if self._check is not None:
                    check = [*prefix, "/bin/sh", "-c", self._check]
                    reward = float(self._launched(check, {})[0] == 0)
            finally:
                asyncio.run(self._sealed(session, code))
        if reward is not None:
            asyncio.run(self._rewarded(session, reward))
        return Sibling(session.id, reward, code, stdout, stderr)

    def _launched(self, argv: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str, str]:
        environment = redirected(os.environ, variables) if variables else None
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._running.add(process)
        if self._ending.is_set():
            process.terminate()
        try:
            stdout, stderr = process.communicate()
        finally:
            self._running.discard(process)
        return process.returncode, stdout, stderr

    def _created(self, entry: Entry) -> Session:
        async def create() -> Session:
            async with Client(self._proxy, self._key) as client:
                return await client.create_session(self._command.request(entry))

        return asyncio.run(create())

    async def _sealed(self, session: Session, code: int | None) -> None:
        async with Client(self._proxy, self._key) as client:
            await seal_session(client, session, code)

    async def _rewarded(self, session: Session, reward: float) -> None:
        async with Client(self._proxy, self._key) as client:
            await client.reward(session.id, CHECK, reward, verifier_key=session.verifier_key)
