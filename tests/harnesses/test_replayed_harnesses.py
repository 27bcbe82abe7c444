"""Recorded sessions of installed programs, re-entered: a fixed sample of ``bench re-entry``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bridle.bench.re_entry import Draw, bench_re_entry
from bridle.bench.re_entry_results import Cell, Report
from bridle.bench.re_entry_speed import measure
from bridle.bench.seeded_policy import Kind, Work
from bridle.bench.shell_policy import train_bench_tokenizer
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.recipes.models.tiny import TinyShape, make_policy

WHOLE = Cell("codex", "process", Kind.WORK, 7, 20, recorded=20, entered=20, equal=20, conserved=20)


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
    report = Report()
    await bench_re_entry([harness], [sandbox], [kind], Draw(1, 5, 7, seed=1), report)
    print(f"\n{report.markdown()}")
    assert report.failures() == []
    (cell,) = report.measured
    assert (cell.recorded, cell.entered + len(cell.stopped)) == (1, 1)
    assert kind is not Kind.WORK or cell.entered == 1


@pytest.mark.parametrize(
    ("cell", "failure"),
    [
        (WHOLE, None),
        (replace(WHOLE, entered=19, equal=19, stopped=("why",)), None),
        (replace(WHOLE, entered=18, equal=18, stopped=("a", "b")), "18 of 20 sessions of work"),
        (replace(WHOLE, equal=19), "1 first live prompts differ"),
        (replace(WHOLE, asked=2), "2 engine calls for replayed turns"),
        (replace(WHOLE, conserved=19), "1 sessions lost tokens"),
        (replace(WHOLE, problems=("silent: gone",)), "silent: gone"),
    ],
)
def test_the_requirements_of_the_bench_fail_by_name(cell: Cell, failure: str | None) -> None:
    report = Report()
    report.add(cell)
    assert len(report.failures()) == (failure is not None)
    assert failure is None or failure in report.failures()[0]
    assert all(line in report.markdown() for line in (*report.failures(), *cell.stopped))


async def test_a_run_measures_what_the_file_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    timed = replace(WHOLE, seconds=4.0, seconds_again=3.0)
    alone = Cell("codex", "process", Kind.WORK, 30, recorded=1, stopped=("why",), conserved=1)
    silent = Cell("codex", "process", Kind.CUT, 30, recorded=1, problems=("silent: gone",))
    for cell in (timed, alone, silent, replace(silent, recorded=0, seed=31)):
        Report.read(file).add(cell)
    report = Report.read(file)
    assert report.measured == [timed, alone, silent]
    assert report.missing("codex", "process", Kind.WORK, range(5, 32)) == [5, 6, 27, 28, 29, 31]
    assert report.missing("codex", "forked", Kind.WORK, range(7, 9)) == [7, 8]
    text = " ".join(report.markdown().splitlines())
    assert "Of 21 sessions of work, 20 were re-entered and 1 stopped with a reason." in text
    assert "Of 1 others, 0 were re-entered and 0 stopped with a reason. 1 ended otherwise." in text
    assert "| codex | process | work | 21 | 20 | 1 | 20 | 0 | 0 | 21 | 0.75 |" in text
    await bench_re_entry(["codex"], ["process"], [Kind.WORK], Draw(20, seed=7), report)
    assert len(report.measured) == 3


def test_the_table_on_the_page_is_that_of_the_committed_results() -> None:
    docs = Path(__file__).parents[2] / "docs"
    table = Report.read(docs / "results" / "re-entry.jsonl").markdown()
    assert table in (docs / "re-entry.md").read_text(encoding="utf-8")


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
