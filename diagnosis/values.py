"""The recorded siblings of a session, by the turn at which they left its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bridle.diagnosis.why import Value
from bridle.store.call import CallRow
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.reward import Reward

SUCCESS: Final = 1.0
LOST: Final = "lost_at_turn"
"""Name of the finding about the turn that lost a session."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The siblings that leave the record of a session at one of its turns."""

    turn: int
    """Number of the first live turn, from 1."""
    siblings: tuple[tuple[SessionRecord, float | None], ...]
    """The siblings, each with its reward."""

    @property
    def value(self) -> Value:
        """The chance of success before the turn, by the siblings that have a reward."""
        rewards = [reward for _, reward in self.siblings if reward is not None]
        return Value(sum(one >= SUCCESS for one in rewards), len(rewards))


def branches_of(
    reader: Reader,
    session_id: str,
    calls: Sequence[CallRow],
    number: Callable[[str | None, Sequence[Reward]], float | None],
) -> list[Branch]:
    """Return the branches of a session with these ``calls``, in the order of their turns.

    ``number`` returns the reward of a session from its run and its rewards.
    """
    found = list(reader.sessions(origin=session_id))
    rewards = reader.rewards_of([one.id for one in found])
    turns = {call.id: turn for turn, call in enumerate(calls, 1)}
    by_turn: dict[int, list[tuple[SessionRecord, float | None]]] = {}
    for one in found:
        turn = turns.get(one.origin_call_id or "", len(turns) + 1)
        by_turn.setdefault(turn, []).append((one, number(one.run_id, rewards[one.id])))
    return [Branch(turn, tuple(siblings)) for turn, siblings in sorted(by_turn.items())]
