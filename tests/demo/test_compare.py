"""Test the comparison of demo runs: what it counts, and that it goes on where it was stopped."""

from __future__ import annotations

from math import inf
from pathlib import Path

import orjson
import pytest

from bridle.recipes.demo import compare as comparing
from bridle.recipes.demo.compare import compare, main, table, tokens_until


def test_tokens_count_until_two_steps_in_a_row_have_the_reward_on_average():
    steps = [(100.0, 0.95, 9.0), (50.0, 0.7, 9.0), (60.0, 0.9, 9.0), (70.0, 0.92, 9.0)]
    assert tokens_until(steps, 0.8) == 150
    assert tokens_until(steps, 0.9) == 280
    assert tokens_until(steps, 0.95) == inf


def run(way: str, seed: int, *steps: tuple[float, float]) -> dict[str, object]:
    sampled = sum(tokens for tokens, _ in steps)
    held_out = {"reward_after": steps[-1][1], "tokens_captured": sampled}
    return {"way": way, "seed": seed, "steps": [(*step, 30.0) for step in steps], **held_out}


def test_the_table_compares_each_way_with_the_first():
    grpo = [run("grpo", seed, (100, 0.5), (100, 0.9), (100, 0.9)) for seed in (1, 2)]
    branched = [
        run("siblings", 2, (50, 0.6), (40, 0.8)),
        run("siblings", 1, (50, 0.9), (40, 0.9), (10, 0.9)),
    ]
    lines = table([*branched, *grpo], 0.9).splitlines()
    assert lines[2:] == [
        "| grpo | 0.90, 0.90 | 0.900 | 300 | 300, 300 | 1.00 |",
        "| siblings | 0.90, 0.80 | 0.850 | 95 | 90, – | – |",
    ]


def test_a_stopped_comparison_runs_what_is_left(tmp_path, monkeypatch, capsys):
    (tmp_path / "figures.jsonl").write_bytes(
        orjson.dumps(run("grpo", 5, (9, 1.0), (9, 1.0))) + b"\n"
    )
    monkeypatch.setattr(
        comparing, "_run", lambda _start, _out, way, seed, _more: run(way, seed, (4, 1.0), (4, 1.0))
    )
    arguments = [str(tmp_path), str(tmp_path), "--seeds", "1", "--first-seed", "5"]
    main([*arguments, "--way", "grpo", "--way", "sessions", "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "| sessions | 1.00 | 1.000 | 8 | 8 | 0.44 |" in capsys.readouterr().out
    lines = (tmp_path / "figures.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["way"] for line in lines] == ["grpo", "sessions"]


def test_a_run_that_fails_does_not_end_the_others(tmp_path, capsys):
    found = compare(tmp_path / "nothing", tmp_path / "out", ["grpo"], [1], ["no=1"], 1)
    assert found == []
    assert "a run failed: " in capsys.readouterr().err
    assert "no" in (tmp_path / "out" / "grpo-1" / "log").read_text()


@pytest.mark.parametrize("way", comparing.WAYS)
def test_each_way_is_settings_of_a_demo(way):
    from bridle.recipes.demo.settings import DemoSettings, with_changes

    assert with_changes(DemoSettings(), [*comparing.COMMON, *comparing.WAYS[way]]).goal == 2


def test_the_published_tables_are_those_of_the_published_figures():
    results = Path(__file__).parents[2] / "docs" / "results"
    page = (results / "shop-app.md").read_text()
    for folder in ("shop-app", "shop-app-vllm"):
        lines = (results / folder / "figures.jsonl").read_bytes().splitlines()
        assert table([orjson.loads(line) for line in lines], 0.9) in page
