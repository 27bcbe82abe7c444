"""Scorers are tried on a made-up session before the first session of a training run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bridle.harnesses.sandboxes.bounds import Bounds
from bridle.harnesses.scorers import SCORERS, scorers
from bridle.harnesses.scorers.trial import require_scorers
from bridle.harnesses.tasks import Task
from bridle.registry import PartFailed
from support.processes import bridle

TASK = Task("t0", "Question 0?", payload={"answer": "7"})
BOUNDS = Bounds(verifier_s=3)


def written(folder: Path, body: str, kind: str = "def") -> str:
    file = folder / "own.py"
    file.write_text(
        f"import os, sys, time\nfrom bridle import Score\n\n{kind} mine(session):\n    {body}\n"
    )
    return f"{file}:mine"


def tried(*named: str, task: Task = TASK) -> None:
    require_scorers(named, scorers(named), task, BOUNDS)


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return session.task.payload['hint']", "raised KeyError: 'hint' ({file}, line 5)"),
        ("return session.calls", "raised AttributeError: 'FinishedSession' object has no"),
        ("return ['mine']", "'mine' is no reward: return a number, numbers by name"),
        ("return float('nan')", "reward is nan"),
        ("return None", "raised TypeError: float() argument must be"),
    ],
)
def test_a_scorer_that_is_wrong_is_refused_before_a_run_starts(
    tmp_path: Path, kind: str, body: str, message: str
) -> None:
    name = written(tmp_path, body, kind)
    expected = re.escape(message.format(file=tmp_path / "own.py"))
    with pytest.raises(PartFailed, match=expected) as refused:
        tried("format", name)
    assert str(refused.value).startswith(f"the scorer '{name}' fails on a made-up session: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("time.sleep(600)", "took more than 3 s (agent.bounds.verifier_s)"),
        ("os._exit(7)", "the scorer's process ended with exit code 7 before its verdict"),
        ("sys.exit('no')", "raised SystemExit: no"),
    ],
)
def test_a_scorer_that_hangs_or_ends_its_process_is_refused(
    tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(PartFailed, match=re.escape(message)):
        tried(written(tmp_path, body))


def test_a_scorer_that_no_other_process_can_run_is_refused(tmp_path: Path) -> None:
    name = written(tmp_path, "return 1.0")
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n"
    file = tmp_path / "own.py"
    file.write_text(thread + file.read_text())
    with pytest.raises(PartFailed, match="process of its own: its import starts 1 threads"):
        tried(name)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("def", "return [Score('turn', len(one.text), turn=one.turn) for one in session.turns]"),
        ("def", "return {'answer': float(session.answer == session.task.payload['answer'])}"),
        ("def", "assert 'notes.txt' in session.artefacts"),
        ("async def", "assert len(session.turns) == 64"),
        ("async def", "return float(await session.ask('policy', [], 9))"),
    ],
)
def test_a_scorer_that_is_sound_or_cannot_be_judged_passes(
    tmp_path: Path, kind: str, body: str
) -> None:
    name = written(tmp_path, body, kind)

    async def within_a_loop() -> None:
        tried(name)

    tried(name)
    asyncio.run(within_a_loop())


@pytest.mark.parametrize("payload", [{}, {"rubric": "Be right."}])
def test_every_scorer_of_ours_passes_its_trial(payload: dict[str, str]) -> None:
    tried(*SCORERS.names(), task=Task("t0", "Question 0?", payload=payload))


@pytest.mark.usefixtures("warm_start")
def test_training_ends_with_a_line_before_anything_starts(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    name = written(tmp_path, "return session.task.payload['answer']")
    refused = bridle(*training_arguments(), "--set", f'scorers.named=["{name}"]')
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert refused.stderr == (
        f"bridle: the scorer '{name}' fails on a made-up session: the scorer raised KeyError: "
        f"'answer' ({tmp_path / 'own.py'}, line 5)\n"
    )
    assert not (tmp_path / "out" / "bridle.db").exists()
    assert not (tmp_path / "out" / "sessions").exists()
