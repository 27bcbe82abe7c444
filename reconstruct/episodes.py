"""Sessions as the trainer takes them, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from bridle.reconstruct.kinds.kinds import with_kinds
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.policy import DEFAULT_POLICY, TrainablePolicy
from bridle.reconstruct.samples.sample import Episode
from bridle.reconstruct.session import SessionTree
from bridle.store.reading.queries import Reader
from bridle.store.records import Reward, SessionRecord

AT_ONCE: Final = 16
"""Sessions per query."""


def build_episode(
    reader: Reader,
    session_id: str,
    policy: TrainablePolicy = DEFAULT_POLICY,
    builder: str = "tree",
) -> Episode:
    """A session's samples, rewards and token table.

    Raises :class:`bridle.store.errors.NotFound`, and :class:`bridle.reconstruct.session.BrokenTree`
    when the store contradicts itself.
    """
    session, tree = reader.session(session_id), SessionTree.load(reader, session_id)
    return _episode(session, tree, reader.rewards(session_id), policy, builder)


def episodes(
    reader: Reader,
    policy: TrainablePolicy = DEFAULT_POLICY,
    builder: str = "tree",
    **filters: Any,
) -> Iterator[Episode]:
    """The episodes of all sessions that match ``filters`` (those of ``Reader.sessions``).

    Sessions are read ``AT_ONCE`` at a time, so that the database is asked for all of them together;
    more than these are never in memory.
    """
    sessions = reader.sessions(**filters)
    while batch := list(islice(sessions, AT_ONCE)):
        ids = [session.id for session in batch]
        (calls, rows), rewards = reader.recorded_of(ids), reader.rewards_of(ids)
        for session in batch:
            key = session.id
            tree = SessionTree(key, with_kinds(calls.pop(key)), rows.pop(key))
            yield _episode(session, tree, rewards.pop(key), policy, builder)


def _episode(
    session: SessionRecord,
    tree: SessionTree,
    rewards: Sequence[Reward],
    policy: TrainablePolicy,
    builder: str,
) -> Episode:
    built = build(tree, policy, builder)
    return Episode(session, built.samples, tuple(rewards), built.conservation)
