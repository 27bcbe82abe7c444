"""The rewards of a finished session at their places, and findings about those that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bridle.harnesses.scorers.named import Scorer
from bridle.harnesses.scorers.session import FinishedSession, Turn
from bridle.harnesses.verifiers.delivery import Score, VerifierError
from bridle.store.reward import Reward, RewardKind, RewardSource

log = logging.getLogger(__name__)

MISPLACED = "misplaced_reward"
"""The finding about a reward whose place is not in the session."""
FAILED = "scorer_failed"
"""The finding about a scorer that gave no rewards."""


@dataclass(frozen=True, slots=True)
class Places:
    turns: Sequence[Turn]
    _ids: dict[int, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ids.update({one.turn: one.id for one in self.turns})

    def rewards(
        self, session_id: str, scores: Iterable[Score], source: RewardSource
    ) -> list[Reward]:
        """Return rewards of the session; a turn's has the id of its call.

        A reward of a turn, call or branch that the session does not have is a finding. A role may
        have made no call.
        """
        return [self._placed(one).reward(session_id, source) for one in scores]

    def _placed(self, score: Score) -> Score:
        known = self._ids.values()
        at_turn = self._ids.get(score.turn or 0)
        lost = (
            (score.turn is not None and at_turn is None)
            or (score.turn is not None and score.call_id not in (None, at_turn))
            or any(one is not None and one not in known for one in (score.call_id, score.branch))
        )
        if lost:
            where = {
                name: value
                for name in ("branch", "call_id", "turn")
                if (value := getattr(score, name)) is not None
            }
            detail = {"reward": score.name, "value": score.value, **where}
            log.warning("%s: reward %s, the session has no %s", MISPLACED, score.name, where)
            return Score(MISPLACED, 1.0, kind=RewardKind.FINDING, detail=detail)
        if score.turn is None:
            return score
        return replace(score, call_id=at_turn)


async def scored(session: FinishedSession, scorers: Iterable[Scorer]) -> list[Reward]:
    """Return the rewards of all scorers, which run at a time.

    A scorer that fails has a finding in the place of its rewards, with its name and the reason.
    """
    places = Places(session.turns)
    given = await asyncio.gather(*(_scores(session, one) for one in scorers))
    return [
        reward for one in given for reward in places.rewards(session.id, one, RewardSource.SCORER)
    ]


async def _scores(session: FinishedSession, scorer: Scorer) -> tuple[Score, ...]:
    try:
        return await scorer(session)
    except VerifierError as error:
        log.warning("%s: %s, session %s: %s", FAILED, scorer.name, session.id, error)
        detail = {"scorer": scorer.name, "error": str(error)}
        return (Score(FAILED, 1.0, kind=RewardKind.FINDING, detail=detail),)
