"""Sessions as the trainer takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridle.reconstruct.samples.builders import build, not_built
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.samples.sample import Episode
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader


def episode_of(
    session: LoadedSession, rules: SampleRules = DEFAULT_RULES, builder: str = "tree"
) -> Episode:
    """A session's samples, rewards and account of tokens.

    Raises :class:`bridle.reconstruct.tree.BrokenTree` when the store contradicts itself.
    """
    built = build(session, rules, builder)
    return Episode(session.record, built.samples, tuple(session.all_rewards), built.conservation)


def broken_episode(session: LoadedSession) -> Episode:
    """A session whose tree is broken: it has no samples, and all of its tokens are dropped."""
    return Episode(session.record, (), tuple(session.all_rewards), not_built(session))


def episodes(
    reader: Reader,
    rules: SampleRules = DEFAULT_RULES,
    builder: str = "tree",
    **filters: Any,
) -> Iterator[Episode]:
    """The episodes of all sessions that match ``filters`` (those of ``Reader.sessions``)."""
    for session in LoadedSession.stream(reader, reader.sessions(**filters)):
        yield episode_of(session, rules, builder)
