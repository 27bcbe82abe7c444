"""The rewards that a run reported, kept apart from the store, to verify what the store returns.

Others can change a store: a program with access to its file, or a trigger in it. A trainer that
reads rewards from the store compares them with these, and takes no step on a difference.
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
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource

GIVEN_FILE: Final = "given-rewards.jsonl"
"""The name of the file in the output folder of a training run."""


class RewardsDiffer(BridleError):
    """The store returns rewards of a session that differ from those that the run reported."""


Place = tuple[str | None, str | None, str | int | None]
Given = tuple[str, float, RewardKind, FindingMode | None, RewardSource, Place]
"""The name, value and kind of a reward, the mode of a finding, the source, and the place."""
_OF_A_RUN: Final = (RewardSource.VERIFIER, RewardSource.SCORER)


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file: the beginning of a session, or one of its rewards."""

    session: str
    name: str | None = None
    value: float = 0.0
    kind: RewardKind = RewardKind.SCORE
    mode: FindingMode | None = None
    source: RewardSource = RewardSource.VERIFIER
    place: Place = (None, None, None)


class GivenRewards:
    """The rewards of verifier and scorers by session, as the run reported them.

    It can be used from any thread.

    With a ``file``, a resumed run knows the rewards of its earlier attempts. Sessions must not see
    the file.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._given: dict[str, list[Given]] = {}
        if file is not None and file.exists():
            for text in file.read_bytes().splitlines():
                self._keep(_read(file, text))

    def begin(self, session_id: str) -> None:
        """Begin a session, all of whose rewards are known from here on."""
        self._write(_Line(session_id))

    def add(self, reward: Reward) -> None:
        """Record a reward that is about to be reported. A turn's has the id of its call."""
        facts = (reward.name, float(reward.value), reward.kind, reward.mode, reward.source)
        self._write(_Line(reward.session_id, *facts, reward.place))

    def knows(self, session_id: str) -> bool:
        """Return whether this run began the session; nothing is known about others."""
        return session_id in self._given

    def require(self, session_id: str, stored: Iterable[Reward]) -> None:
        """Raise :class:`RewardsDiffer` unless the run's rewards are the reported ones.

        The rewards of the verifier and of scorers are taken from ``stored``. Each must have the
        same name, value, kind, mode, source and place.
        """
        if not self.knows(session_id):
            return
        given = Counter(self._given[session_id])
        found = Counter(_given(one) for one in stored if one.source in _OF_A_RUN)
        if given != found:
            raise RewardsDiffer(
                f"session {session_id}: the store has the run's rewards {_shown(found)}, and "
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
            given.append((line.name, line.value, line.kind, line.mode, line.source, line.place))


def _read(file: Path, text: bytes) -> _Line:
    try:
        return msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError:
        # The last line of a process that was killed; its session was not sealed.
        return _Line(f"unreadable line of {file}")


def _given(reward: Reward) -> Given:
    facts = (reward.name, reward.value, reward.kind, reward.mode, reward.source)
    return (*facts, reward.place)


def _shown(rewards: Counter[Given]) -> str:
    texts = [
        f"{name}={value:g}"
        + ("" if kind == RewardKind.SCORE else f" ({kind}, {mode})" if mode else f" ({kind})")
        + ("" if source == RewardSource.VERIFIER else f" of a {source}")
        + "".join(f" at {part}" for part in place if part is not None)
        for name, value, kind, mode, source, place in sorted(rewards.elements(), key=repr)
    ]
    return ", ".join(texts) or "none"
