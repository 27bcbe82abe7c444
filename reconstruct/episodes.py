"""Sessions as the trainer takes them, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reconstruct.builders import build
from reconstruct.policy import DEFAULT_POLICY, TrainablePolicy
from reconstruct.samples import Episode
from reconstruct.tree import SessionTree
from store.queries import Reader
from store.records import SessionRecord


def build_episode(
    reader: Reader,
    session_id: str,
    policy: TrainablePolicy = DEFAULT_POLICY,
    builder: str = "tree",
) -> Episode:
    """A session's samples, rewards and token table.

    Raises :class:`store.errors.NotFound`, and :class:`reconstruct.tree.BrokenTree` when the store
    contradicts itself.
    """
    return _episode(reader, reader.session(session_id), policy, builder)


def episodes(
    reader: Reader,
    policy: TrainablePolicy = DEFAULT_POLICY,
    builder: str = "tree",
    **filters: Any,
) -> Iterator[Episode]:
    """The episodes of all sessions that match ``filters`` (those of ``Reader.sessions``).

    One session is in memory at a time.
    """
    for session in reader.sessions(**filters):
        yield _episode(reader, session, policy, builder)


def _episode(
    reader: Reader, session: SessionRecord, policy: TrainablePolicy, builder: str
) -> Episode:
    built = build(SessionTree.load(reader, session.id), policy, builder)
    return Episode(
        session=session,
        samples=built.samples,
        rewards=tuple(reader.rewards(session.id)),
        conservation=built.conservation,
    )
