"""Reading rewards, each with the call that it is about.

A reward may have been given by the number of a turn alone. Turns are the session's calls in the
order of their start, counted from 1; such a reward is read with the id of that call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sqlalchemy import BindParameter, Connection, Row, Select, and_, bindparam, func, select

from bridle.store.reading.damage import RowDamage, as_stored, mended
from bridle.store.reward import Reward, RewardKind, RewardSource
from bridle.store.schema.tables import calls, rewards

log = logging.getLogger(__name__)

_SESSIONS: Final[BindParameter[Any]] = bindparam("sessions", expanding=True)
REWARDS: Final[Select[Any]] = select(*as_stored(rewards)).order_by(
    rewards.c.created_at, rewards.c.id
)
"""The query of all rewards, oldest first."""
REWARDS_OF: Final[Select[Any]] = REWARDS.where(rewards.c.session_id.in_(_SESSIONS))
SCORE_NAMES: Final = (
    select(rewards.c.name)
    .where(rewards.c.kind == RewardKind.SCORE)
    .distinct()
    .order_by(rewards.c.name)
)
_LARGEST: Final = 1e300
"""The bound of the values that are read without a check."""
_CALL_IDS: Final = (
    select(calls.c.id)
    .where(calls.c.session_id == bindparam("session"))
    .order_by(calls.c.started_at, calls.c.id)
)


def read_rewards(
    connection: Connection,
    rows: Iterable[Row[Any]],
    damage: dict[str, list[RowDamage]] | None = None,
) -> dict[str, list[Reward]]:
    """Return the rewards of ``rows``, by session and in the order of the rows.

    Rewards that cannot be read are left out, and their damage is added to ``damage`` by session.
    """
    found: dict[str, list[Reward]] = {}
    by_turn: set[str] = set()
    for row in rows:
        reward, problems = _reward(row)
        if reward is None:
            if damage is not None:
                damage.setdefault(row.session_id, []).extend(problems)
            continue
        found.setdefault(reward.session_id, []).append(reward)
        if reward.call_id is None and reward.turn is not None:
            by_turn.add(reward.session_id)
    for session_id in by_turn:
        ids = list(connection.execute(_CALL_IDS, {"session": session_id}).scalars())
        found[session_id] = [_at_its_call(reward, ids) for reward in found[session_id]]
    return found


class LoneScore(NamedTuple):
    """The only reward of a session: a score of the session as a whole."""

    name: str
    value: float
    source: str

    def reward(self, session_id: str) -> Reward:
        return Reward(session_id, self.name, self.value, 0.0, source=RewardSource(self.source))


def read_lone_scores(
    connection: Connection, session_ids: Select[Any]
) -> tuple[dict[str, LoneScore], list[str]]:
    """Return the only reward of sessions by session, and the sessions that have others.

    Damaged rewards are among the others.
    """
    own = rewards.c
    is_lone = and_(
        func.count() == 1,
        *(func.count(place) == 0 for place in (own.call_id, own.turn, own.role, own.branch)),
        func.min(own.kind) == RewardKind.SCORE,
        func.min(own.source).in_(list(RewardSource)),
        # SQLite sorts texts after numbers.
        func.min(own.value).between(-_LARGEST, _LARGEST),
    )
    query: Select[Any] = (
        select(
            own.session_id,
            *(func.min(column) for column in (own.name, own.value, own.source)),
            is_lone,
        )
        .where(own.session_id.in_(session_ids))
        .group_by(own.session_id)
    )
    lone: dict[str, LoneScore] = {}
    others = []
    for session_id, name, value, source, alone in connection.execute(query).all():
        if alone:
            lone[session_id] = LoneScore(name, value, source)
        else:
            others.append(session_id)
    return lone, others


def _at_its_call(reward: Reward, call_ids: list[str]) -> Reward:
    if reward.call_id is not None or reward.turn is None:
        return reward
    if 1 <= reward.turn <= len(call_ids):
        return replace(reward, call_id=call_ids[reward.turn - 1])
    log.warning(
        "reward %s of session %s is for turn %d, but the session has %d: it reaches no call",
        reward.name,
        reward.session_id,
        reward.turn,
        len(call_ids),
    )
    return reward


def _reward(row: Row[Any]) -> tuple[Reward | None, list[RowDamage]]:
    values, damage = mended(rewards, row)
    identifier = values.pop("id")
    if damage:
        return None, damage
    try:
        return Reward(**values), []
    except ValueError as error:
        return None, [RowDamage("rewards", identifier, "value", str(error))]
