"""The rewards that a run gave in, kept apart from the store, to compare what the store returns.

A store can be changed by others: by a program with access to its file, or a trigger in it. A
trainer that reads rewards from it compares them with these, and takes no step on a difference.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from bridle.errors import BridleError
from bridle.store.records import Reward, RewardSource

GIVEN_FILE: Final = "given-rewards.jsonl"
"""In the output folder of a training run."""


_Counted = Counter[tuple[str, float, str | None, int | None]]
"""Rewards by name, value, call and turn."""


class RewardsDiffer(BridleError):
    """The store returns other rewards of a session than the run gave in."""


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session that was begun, or one of its rewards."""

    session: str
    name: str | None = None
    value: float = 0.0


class GivenRewards:
    """The verifier's rewards by session, as they were given in; from any thread.

    With a ``file`` a resumed run knows those of its earlier attempts. The file is not for sessions
    to see.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._given: dict[str, list[tuple[str, float]]] = {}
        if file is not None and file.exists():
            for text in file.read_bytes().splitlines():
                self._keep(_read(file, text))

    def begin(self, session_id: str) -> None:
        """Has every reward of this session known from here on."""
        self._write(_Line(session_id))

    def add(self, session_id: str, name: str, value: float) -> None:
        """Records a reward that is about to be given in."""
        self._write(_Line(session_id, name, float(value)))

    def knows(self, session_id: str) -> bool:
        """Whether the session was begun by this run; nothing is known of others."""
        return session_id in self._given

    def require(self, session_id: str, stored: Iterable[Reward]) -> None:
        """Raises :class:`RewardsDiffer` unless the verifier's rewards among ``stored`` are those
        that were given in, each by name and value and for the whole session."""
        if not self.knows(session_id):
            return
        given: _Counted = Counter(
            (name, value, None, None) for name, value in self._given[session_id]
        )
        found: _Counted = Counter(
            (one.name, one.value, one.call_id, one.turn)
            for one in stored
            if one.source is RewardSource.VERIFIER
        )
        if given != found:
            raise RewardsDiffer(
                f"session {session_id}: the store has the verifier's rewards {_shown(found)}, and "
                f"this run gave in {_shown(given)}. Something else wrote to the store, so nothing "
                "is trained on it. Find what did (a trigger, a program with access to the file), "
                f"then `bridle forget {session_id}` and resume"
            )

    def _write(self, line: _Line) -> None:
        with self._lock:
            self._keep(line)
            if self._file is None:
                return
            self._file.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._file, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(line) + b"\n")

    def _keep(self, line: _Line) -> None:
        given = self._given.setdefault(line.session, [])
        if line.name is not None:
            given.append((line.name, line.value))


def _read(file: Path, text: bytes) -> _Line:
    try:
        return msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError:
        # The last line of a process that was killed; its session was not sealed.
        return _Line(f"unreadable line of {file}")


def _shown(rewards: _Counted) -> str:
    texts = [
        f"{name}={value:g}" + ("" if call is None and turn is None else f" of turn {turn}")
        for name, value, call, turn in sorted(rewards.elements(), key=repr)
    ]
    return ", ".join(texts) or "none"
