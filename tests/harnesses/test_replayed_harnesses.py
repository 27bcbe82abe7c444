"""Recorded sessions of installed programs, re-entered: a fixed sample of ``bench re-entry``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridle.bench.re_entry import Cell, Draw, Report, bench_re_entry, markdown
from bridle.bench.seeded_policy import Kind, Work

WHOLE = Cell("codex", "process", Kind.WORK, recorded=20, entered=20, equal=20, conserved=20)


@pytest.mark.replay
@pytest.mark.parametrize(
    ("harness", "sandbox", "kind"),
    [
        ("codex", "process", Kind.WORK),
        ("codex", "process", Kind.LONG),
        ("pi", "process", Kind.CUT),
        ("mini-swe-agent", "forked", Kind.WORK),
        ("langchain-chat", "forked", Kind.WORK),
    ],
)
async def test_sessions_of_programs_are_re_entered(harness: str, sandbox: str, kind: Kind) -> None:
    report = await bench_re_entry([harness], [sandbox], [kind], Draw(1, 5, 7, seed=1))
    print(f"\n{markdown(report)}")
    assert report.failures() == []
    (cell,) = report.cells
    assert (cell.recorded, cell.entered + len(cell.stopped)) == (1, 1)
    assert kind is not Kind.WORK or cell.entered == 1


@pytest.mark.parametrize(
    ("cell", "failure"),
    [
        (WHOLE, None),
        (replace(WHOLE, entered=19, equal=19, stopped=("why",)), None),
        (replace(WHOLE, entered=18, equal=18, stopped=("a", "b")), "18 of 20 sessions of foreg"),
        (replace(WHOLE, equal=19), "1 first live prompts differ"),
        (replace(WHOLE, asked=2), "2 engine calls for replayed turns"),
        (replace(WHOLE, conserved=19), "1 sessions lost tokens"),
        (replace(WHOLE, problems=("silent: gone",)), "silent: gone"),
    ],
)
def test_the_requirements_of_the_bench_fail_by_name(cell: Cell, failure: str | None) -> None:
    report = Report(0, [cell])
    assert len(report.failures()) == (failure is not None)
    assert failure is None or failure in report.failures()[0]
    assert markdown(report).count("codex") == 1 + len(cell.stopped) + len(
        [one for one in report.failures() if "codex" in one]
    )


def test_work_follows_from_its_task() -> None:
    for seed in range(50):
        for kind in (Kind.WORK, Kind.CUT, Kind.LONG, Kind.BACKGROUND):
            work = Work.drawn(kind, seed)
            assert Work.stated(["before", work.task("x").prompt]) == work
            turns = work.commands()
            assert len(turns) == work.turns - 1
            assert sum(one.text == "cat found.txt" for turn in turns for one in turn) == 1
    assert {len(turn) for turn in Work.drawn(Kind.WORK, 1, 30, 30).commands()} == {1, 2, 3}
