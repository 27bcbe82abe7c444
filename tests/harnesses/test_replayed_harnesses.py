"""Recorded sessions of installed programs, re-entered: a fixed sample of ``bench re-entry``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bridle.bench.re_entry import Cell, Draw, Report, bench_re_entry, markdown
from bridle.bench.re_entry_speed import measure
from bridle.bench.seeded_policy import Kind, Work
from bridle.bench.shell_policy import train_bench_tokenizer
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.recipes.models.tiny import TinyShape, make_policy

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


def test_the_speed_of_a_re_entry_is_measured_up_to_its_live_turn(tmp_path: Path) -> None:
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=4096)
    train_bench_tokenizer(tmp_path)
    make_policy(tmp_path, shape, vocab_size=Tokenizer(tmp_path).backend.get_vocab_size(), seed=3)
    speed = measure(tmp_path, turns=5, branch=4, max_tokens=8)
    assert (speed.replayed, speed.equal) == (3, True)
    assert speed.reply_tokens <= 3 * 8
    assert speed.again_s > 0
    whole = replace(speed, recorded_s=100.0, again_s=5.0)
    assert whole.failures() == []
    for worse, failure in (
        (replace(whole, again_s=5.1), "took 5.1% of the recording's time"),
        (replace(whole, replayed=2), "2 of 3 turns were replayed"),
        (replace(whole, equal=False), "the prompt of turn 4 is not the recorded one"),
    ):
        assert failure in worse.text().splitlines()[1]
