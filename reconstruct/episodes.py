"""Episodes: sessions in the form that the trainer takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridle.reconstruct.samples.builders import build, not_built
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules, parse_failed
from bridle.reconstruct.samples.sample import Episode, Turn
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import CallRow, Reader


def episode_of(
    session: LoadedSession, rules: SampleRules = DEFAULT_RULES, builder: str = "tree"
) -> Episode:
    """Return a session's samples, rewards and token account.

    Raise :class:`bridle.reconstruct.tree.BrokenTree` if the store contradicts itself.
    """
    built = build(session, rules, builder)
    rewards, turns = tuple(session.all_rewards), turns_of(session)
    task = session.reader.task_of(session.record) if session.record.task_id else None
    payload = {} if task is None else task.payload
    return Episode(session.record, built.samples, rewards, built.conservation, turns, payload)


def turns_of(session: LoadedSession) -> tuple[Turn, ...]:
    """Return the agent's own calls and those of its sub-agents, as turns."""
    return tuple(_turn(call) for call in session.calls if call.kind in DEFAULT_RULES.kinds)


def _turn(call: CallRow) -> Turn:
    reply = call.replies[0] if call.replies else None
    text = reply.content if reply is not None else None
    return Turn(
        call_id=call.id,
        kind=call.kind,
        status=call.status,
        reason=call.reason,
        finish_reason=call.finish_reason,
        tool_calls=len(reply.tool_calls) if reply is not None else 0,
        has_text=bool(text.strip() if isinstance(text, str) else text),
        parse_failed=parse_failed(call),
        role=call.role,
        messages=() if call.conversation is None else tuple(call.conversation.tail),
        reply=reply,
    )


def broken_episode(session: LoadedSession) -> Episode:
    """Return the episode of a session whose tree is broken.

    It has no samples, and all of its tokens are dropped.
    """
    return Episode(session.record, (), tuple(session.all_rewards), not_built(session))


def episodes(
    reader: Reader, rules: SampleRules = DEFAULT_RULES, **filters: Any
) -> Iterator[Episode]:
    """Yield the episodes of all sessions that match ``filters`` (those of ``Reader.sessions``)."""
    for session in LoadedSession.stream(reader, reader.sessions(**filters)):
        yield episode_of(session, rules)
