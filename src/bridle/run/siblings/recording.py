"""A recorded session, the re-entries of it, and the base of what runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from bridle.errors import BridleError
from bridle.harnesses.client import Client, Origin
from bridle.reconstruct.rewards import Aggregation
from bridle.store.reward import Reward


class NotReentrant(BridleError):
    """A recorded session cannot be started again; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded session as the control API returns it."""

    session: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]]
    """Its calls in the order of their start, each with its ``turn``."""
    run: Mapping[str, Any] | None = None
    """The run that it belongs to, with its settings as ``config``."""
    rewards: Sequence[Reward] = ()

    @classmethod
    async def load(cls, client: Client, session_id: str) -> Self:
        """Read a session, its calls and its run. Raise the errors of the client."""
        session = await client.session(session_id)
        run_id = session["run_id"]
        run = None if run_id is None else await client.run(run_id)
        calls, rewards = await client.calls(session_id), await client.rewards(session_id)
        return cls(session, calls, run, rewards)

    @property
    def id(self) -> str:
        return str(self.session["id"])

    @property
    def reward(self) -> float | None:
        """The session's reward, or ``None`` if it has none."""
        return Aggregation().value(self.rewards)

    def complete(self) -> list[Mapping[str, Any]]:
        """Return the complete calls, at which a session can be re-entered."""
        return [call for call in self.calls if call["status"] == "complete"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A re-entry: where it leaves the record, and by which rules."""

    origin: Origin
    rules: Mapping[str, Any] = field(default_factory=dict)
    """The session's ``settings.replay``."""
    group_id: str | None = None


@dataclass(frozen=True, slots=True)
class Sibling:
    """A session that re-entered the recorded one, when it is over."""

    session_id: str | None
    """Its id, or ``None`` if it could not be created."""
    reward: float | None
    """Its reward, or ``None`` if nothing scored it."""
    exit_code: int | None = None
    stdout: str = ""
    """The command's output, where it had no terminal."""
    stderr: str = ""
    error: str = ""
    """The reason why it ended without a result."""


class Siblings(ABC):
    """A runner of re-entries of one recorded session. It is a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:  # noqa: B027 - most have nothing to end
        """End what outlives :meth:`run`."""

    @abstractmethod
    def run(self, entry: Entry, count: int) -> Generator[Sibling]:
        """Run ``count`` re-entries, and yield each when it is over.

        Closing the generator ends the others.
        """
