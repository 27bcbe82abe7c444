"""The attempts at a run; the store records that one is running, and how each ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from bridle.diagnosis.pages import count_sessions
from bridle.store.errors import StoreUnavailable
from bridle.store.reading.accounts import stored_account
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import RunRecord
from bridle.store.writing.writer import Writer

log = logging.getLogger(__name__)

_LONGEST_REASON: Final = 300
"""Maximum characters of the line with the reason why an attempt failed."""


@contextmanager
def attempt(store: str, *runs: RunRecord) -> Iterator[None]:
    """Record an attempt at each of ``runs``, which are added to the store unless it has them.

    The runs are ``running`` until the context ends. Then they are ``completed``, ``stopped`` after
    Ctrl-C or SIGTERM (:func:`bridle.cli.serving.leave_on_sigterm`), or ``failed``. If the process
    is killed, the next writer of the store sets them to ``failed``.
    """
    with Writer(store) as writer:
        writer.begin_run(*runs)
        status, reason = "completed", None
        try:
            yield
        except BaseException as error:
            status, reason = ending(error)
            raise
        finally:
            try:
                for run in runs:
                    writer.finish_run(run.id, status, reason=reason)
            except StoreUnavailable as error:
                log.warning("how run %s ended is not recorded: %s", runs[0].id, error)


def ending(error: BaseException) -> tuple[str, str | None]:
    """Return the status of a run that ``error`` ended, and the reason in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted"
    if isinstance(error, SystemExit):
        return ("failed", f"exit status {error.code}") if error.code else ("completed", None)
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return "failed", line[:_LONGEST_REASON]


@dataclass(frozen=True, slots=True)
class AttemptFigures:
    """The figures of one attempt at a run."""

    number: int
    status: str
    reason: str | None
    minutes: float
    sessions: int
    """Number of the run's sessions that began in the attempt."""
    tokens: int
    """Number of tokens that those sessions sampled."""


def attempt_figures(reader: Reader, run_id: str) -> list[AttemptFigures]:
    """Return the attempts at a run, oldest first. A running attempt is counted up to now."""
    now = time.time()
    found = []
    for one in reader.attempts(run_id):
        ended = now if one.ended_at is None else one.ended_at
        wanted = SessionFilter(run=run_id, since=one.started_at, until=ended)
        number = count_sessions(reader, wanted, account=True)
        minutes = max(0.0, ended - one.started_at) / 60
        figures = (number, stored_account(reader, wanted).captured)
        found.append(AttemptFigures(one.number, one.status, one.reason, minutes, *figures))
    return found


def attempts_as_data(figures: list[AttemptFigures]) -> dict[str, Any]:
    """Return ``minutes`` of all attempts, ``last_attempt_minutes``, and ``attempts`` one by one."""
    return {
        "minutes": sum(one.minutes for one in figures),
        "last_attempt_minutes": figures[-1].minutes if figures else 0.0,
        "attempts": [asdict(one) for one in figures],
    }
