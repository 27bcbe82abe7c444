"""A workload: sessions of one shape at a rate, as they are wanted or as a run recorded them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from bridle.errors import UsageError
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus
from bridle.trainer.config import AboveZero, AtLeastZero


@dataclass(frozen=True, slots=True)
class Workload:
    """The means over a workload's sessions."""

    sessions_per_hour: AboveZero
    turns: Annotated[float, Meta(ge=1)]
    prompt: AboveZero
    """Number of tokens in a session's first prompt."""
    added: AtLeastZero
    """Number of tokens between a reply and the next one: tool results, and text of the template."""
    sampled: AboveZero
    """Number of tokens in a reply."""
    shared: AtLeastZero = 0.0
    """Number of tokens of the first prompt that other sessions begin with as well, such as a system
    prompt. An engine's prefix cache has them."""

    @property
    def calls_per_s(self) -> float:
        return self.sessions_per_hour * self.turns / 3600

    @property
    def observed(self) -> float:
        """Number of a session's tokens that were not sampled, each counted once."""
        return self.prompt + self.added * (self.turns - 1)

    @property
    def tokens(self) -> float:
        """The number of a session's tokens, each counted once.

        They are the tokens of its last context, and of its tree in training.
        """
        return self.observed + self.sampled * self.turns

    @property
    def read(self) -> float:
        """The number of a session's tokens that an engine computes besides those it samples."""
        return self.observed - self.shared

    @property
    def context(self) -> float:
        """The mean number of tokens before a sampled token."""
        between = (self.added + self.sampled) * (self.turns - 1) / 2
        return self.prompt + between + self.sampled / 2


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The shape of a recorded run's sessions, and the time their calls kept an engine busy."""

    sessions: int
    workload: Workload
    parallel: float
    """The mean number of calls at a time, while there was one."""
    engine_seconds: float
    """Seconds per session in which a call was running."""


def recorded_run(reader: Reader, run_id: str) -> RecordedRun:
    """Return the run's figures, from its sealed sessions that have a complete call.

    Raise :class:`bridle.store.errors.NotFound` for an unknown run, and
    :class:`bridle.errors.UsageError` for one without such sessions.
    """
    reader.run(run_id)
    ids = [session.id for session in reader.sessions(run=run_id, sealed=True)]
    calls = {session_id: _complete(reader.calls(session_id)) for session_id in ids}
    calls = {session_id: found for session_id, found in calls.items() if found}
    if not calls:
        raise UsageError(f"run {run_id} has no ended session with a complete call")
    counts = reader.token_counts_of(list(calls)).values()
    number = len(calls)
    turns = sum(map(len, calls.values())) / number
    prompt = sum(found[0].prompt_tokens or 0 for found in calls.values()) / number
    observed = sum(seen for seen, _ in counts) / number
    sampled = sum(drawn for _, drawn in counts) / number
    busy = [(call.started_at, call.ended_at) for found in calls.values() for call in found]
    spans = [(began, ended) for began, ended in busy if ended is not None]
    running = _covered(spans)
    whole = max(ended for _, ended in spans) - min(began for began, _ in spans)
    workload = Workload(
        sessions_per_hour=3600 * number / whole,
        turns=turns,
        prompt=prompt,
        added=(observed - prompt) / (turns - 1) if turns > 1 else 0.0,
        sampled=sampled / turns,
        shared=prompt - _distinct(reader, [found[0].id for found in calls.values()]) / number,
    )
    parallel = sum(ended - began for began, ended in spans) / running
    return RecordedRun(number, workload, parallel, running / number)


def _distinct(reader: Reader, call_ids: Iterable[str]) -> int:
    """Return the number of tokens in the calls' prompts, counting a common beginning once."""
    prompts = [reader.prompt_token_ids(call_id) for call_id in call_ids]
    # Big-endian bytes sort as the ids do, and neighbours then share the most.
    ordered = sorted(ids.astype(">u4").tobytes() for ids in prompts if ids is not None)
    before, distinct = np.array([], np.uint32), 0
    for prompt in ordered:
        ids = np.frombuffer(prompt, ">u4")
        length = min(len(ids), len(before))
        differs = np.flatnonzero(ids[:length] != before[:length])
        distinct += len(ids) - (int(differs[0]) if differs.size else length)
        before = ids
    return distinct


def _complete(calls: Iterable[CallRow]) -> list[CallRow]:
    return [call for call in calls if call.status is CallStatus.COMPLETE and call.sampled_tokens]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return covered
