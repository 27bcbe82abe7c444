"""A trial of scorers on a made-up session of the run's first task, before its first real one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.scorers.named import SCORERS, Scorer
from bridle.harnesses.scorers.session import FinishedSession, Turn
from bridle.harnesses.tasks.task import Task
from bridle.harnesses.verifiers.delivery import FunctionFault, NoVerdict, VerifierError

log = logging.getLogger(__name__)

_TURNS: Final = tuple(
    Turn(
        turn=number,
        id=f"trial/{number}",
        continues=number - 1 or None,
        kind="main",
        finish_reason="stop",
        messages=[{"role": "user", "content": f"question {number}"}],
        replies=[{"role": "assistant", "content": f"reply {number}"}],
        prompt_tokens=8,
        sampled_tokens=4,
        started_at=float(number),
        ended_at=number + 0.5,
    )
    for number in (1, 2)
)


def require_scorers(
    named: Iterable[str], scorers: Iterable[Scorer], task: Task, bounds: Bounds
) -> None:
    """Raise :class:`bridle.registry.PartFailed` for a scorer that fails on a made-up session.

    ``named`` are the names under which the run has the scorers. Each runs as it does in the run,
    with its bounds. A scorer that asks a model, or that says by :class:`VerifierError` or an
    assertion that it has no verdict, is not judged.
    """
    with ThreadPoolExecutor(1) as aside:  # the caller may have an event loop of its own
        for name, scorer in zip(named, scorers, strict=True):
            aside.submit(asyncio.run, _try(name, scorer, task, bounds)).result()


async def _try(name: str, scorer: Scorer, task: Task, bounds: Bounds) -> None:
    session = FinishedSession(
        "trial", task, _TURNS, "completed", "reply 2", {"reward": 1.0}, 2.0, {}, bounds, _unserved
    )
    try:
        await scorer(session)
    except (FunctionFault, NoVerdict) as error:
        raise SCORERS.failed(name, f"fails on a made-up session: {error}") from error
    except VerifierError as error:
        log.info("the scorer %s is not tried: %s", name, error)


async def _unserved(model: str, messages: Sequence[Mapping[str, Any]], tokens: int) -> str:
    raise VerifierError(f"no model is asked before a run: not {model}")
