"""The worker processes of one port, and how they agree.

Each worker listens on a Unix socket in a directory that only this user can open. What changes the
state of all (a policy version, a pause, a sealed session) is told to every other worker before the
client is answered; what one alone cannot tell (calls that run, metrics) is asked of all. A worker
that was started anew asks the others what has been changed before it listened.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from bridle.errors import BridleError

log = logging.getLogger("bridle.proxy")

Message = Mapping[str, Any]
Handler = Callable[[Message], Awaitable[Any]]

_LINE_LIMIT: Final = 64 * 1024 * 1024
_PATIENCE_S: Final = 10.0


class SiblingSilent(BridleError):
    """Another worker process lives and does not answer."""

    retryable = True


class Siblings:
    """This worker's place among the others; alone when there is no directory."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._own = None if directory is None else directory / f"{os.getpid()}.sock"
        self._server: asyncio.Server | None = None

    @property
    def alone(self) -> bool:
        """Whether this proxy is one process, with no others to come."""
        return self._directory is None

    async def start(self, handle: Handler) -> None:
        """Answers the others with what ``handle`` makes of their messages."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                answer = await handle(orjson.loads(await reader.readline()))
                writer.write(orjson.dumps(answer) + b"\n")
                await writer.drain()
            except ConnectionError as error:
                log.warning("sibling_hung_up", extra={"error": str(error)})
            finally:
                writer.close()

        if self._own is not None:
            self._own.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(serve, self._own, limit=_LINE_LIMIT)

    async def close(self) -> None:
        if self._server is not None and self._own is not None:
            self._server.close()
            self._own.unlink(missing_ok=True)

    async def ask(self, message: Message, *, patience_s: float | None = _PATIENCE_S) -> list[Any]:
        """Every other worker's answer. Raises :class:`SiblingSilent` after ``patience_s``, if that
        is limited."""
        if self._directory is None:
            return []
        others = [path for path in self._directory.glob("*.sock") if path != self._own]
        answers = await asyncio.gather(*(_ask(path, message, patience_s) for path in others))
        return [answer for answer in answers if answer is not None]


async def _ask(path: Path, message: Message, patience_s: float | None) -> Any:
    """``None`` when the process is gone."""
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_LIMIT)
            try:
                writer.write(orjson.dumps(message) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
    except (ConnectionError, FileNotFoundError):
        _gone(path)
        return None
    except TimeoutError as error:
        raise SiblingSilent(f"worker {path.stem} does not answer") from error
    return orjson.loads(line) if line else None


def _gone(path: Path) -> None:
    """The process behind the socket is dead."""
    path.unlink(missing_ok=True)
