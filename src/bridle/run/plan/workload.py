"""Sessions of one shape, so many an hour: as they are wanted, or as a run recorded them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bridle.errors import UsageError
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import CallStatus


@dataclass(frozen=True, slots=True)
class Workload:
    """Means over sessions."""

    sessions_per_hour: float
    turns: float
    prompt: float
    """Tokens of a session's first prompt."""
    added: float
    """Tokens between a reply and the next one: tool results, and what the template writes."""
    sampled: float
    """Tokens of a reply."""
    shared: float = 0.0
    """Tokens of the first prompt that other sessions begin with as well, such as a system prompt:
    an engine's prefix cache has them."""

    @property
    def calls_per_s(self) -> float:
        return self.sessions_per_hour * self.turns / 3600

    @property
    def observed(self) -> float:
        """Tokens of a session that nobody sampled, each once."""
        return self.prompt + self.added * (self.turns - 1)

    @property
    def tokens(self) -> float:
        """Tokens of a session, each once: of its last context, and of its tree in training."""
        return self.observed + self.sampled * self.turns

    @property
    def read(self) -> float:
        """Tokens of a session that an engine has to compute beside those that it samples."""
        return self.observed - self.shared

    @property
    def context(self) -> float:
        """Tokens before a sampled one, in the mean over the sampled ones."""
        between = (self.added + self.sampled) * (self.turns - 1) / 2
        return self.prompt + between + self.sampled / 2


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run's sessions were, and what their calls kept an engine busy with."""

    sessions: int
    workload: Workload
    parallel: float
    """Calls at a time, while there was one."""
    engine_seconds: float
    """Time in which a call was running, for each session."""


def recorded_run(reader: Reader, run_id: str) -> RecordedRun:
    """The run's sealed sessions that have a complete call.

    Raises :class:`bridle.store.errors.NotFound` for an unknown run, and
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
    """Tokens of the calls' prompts, those of a common beginning once."""
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
    """The length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return covered
