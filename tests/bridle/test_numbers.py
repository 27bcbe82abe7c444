"""The numbers of a real ``bridle train``, in the store, in its tracker and on its page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bridle.reconstruct.evaluation import pass_at_k
from bridle.store.diagnostics import SECTIONS, declared
from bridle.store.reading.queries import Reader
from support.processes import bridle

STEPS = 2
SIZE = 6
ALWAYS = {
    *("reward/turns/1", "reward/name/reward", "pass/at_1", "pass/at_4", "length/cut"),
    *("slots/useful", "advantage/p05", "advantage/positive", "importance/min", "kl/engine"),
    *("kl/sampler/lag_0", "kl/step", "kl/start", "gradient/attention", "gradient/embeddings"),
    *("gradient/mlp", "gradient/norms", "seconds/publish", "seconds/probe", "update/entropy_bonus"),
}


@pytest.mark.loop
@pytest.mark.usefixtures("warm_start")
def test_a_run_has_its_numbers_in_the_store_the_tracker_and_the_page(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = bridle(*training_arguments(), "--steps", str(STEPS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learning rate 0.001 (all weights)" in done.stdout
    store = str(tmp_path / "out" / "bridle.db")
    with Reader(store) as reader:
        (run,) = reader.runs("train")
        metrics = reader.metrics(run.id)
        groups: dict[str, list[float]] = {}
        cut: list[bool] = []
        for session in list(reader.sessions(run=run.id))[: 2 * SIZE]:
            (reward,) = reader.rewards(session.id)
            groups.setdefault(str(session.group_id), []).append(reward.value)
            cut += [call.finish_reason == "length" for call in reader.calls(session.id)]
    steps = [{one.name: one.value for one in metrics if one.step == step} for step in range(STEPS)]
    assert not [name for step in steps for name in step if declared(name) is None]
    for step in steps:
        assert step.keys() >= ALWAYS, ALWAYS - step.keys()
        kinds = [value for name, value in step.items() if name.startswith("gradient/")]
        assert math.hypot(*kinds) == pytest.approx(step["update/grad_norm"], rel=1e-5)
        assert step["advantage/min"] < 0 < step["advantage/max"]
        assert step["kl/step"] > 0
    first, second = steps
    assert {len(rewards) for rewards in groups.values()} == {SIZE}
    rewards = [value for own in groups.values() for value in own]
    assert first["reward/turns/1"] == first["reward/name/reward"] == pytest.approx(fmean(rewards))
    won = [int(sum(own)) for own in groups.values()]
    assert first["pass/at_4"] == pytest.approx(fmean(pass_at_k(SIZE, one, 4) for one in won))
    assert first["length/cut"] == pytest.approx(fmean(cut))
    tasks = [value for name, value in first.items() if name.startswith("reward/task/")]
    assert sorted(tasks) == pytest.approx(sorted(fmean(own) for own in groups.values()))
    assert first["kl/start"] == pytest.approx(first["kl/step"])
    assert second["kl/start"] != second["kl/step"]

    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert set(first) <= set(events.Tags()["scalars"])
    (scalar, _) = events.Scalars("kl/start")
    assert scalar.value == pytest.approx(first["kl/start"], rel=1e-5)

    bundle = tmp_path / "bundle"
    made = bridle("viewer", run.id, "--store", store, "--bundle", str(bundle))
    assert made.returncode == 0, made.stderr
    page = (bundle / "index.html").read_text()
    drawn = re.findall(r"<figcaption><span title=\"[^\"]*\">([^<]*?)(?: <small>|</span>)", page)
    known = {*first, *second}
    expected = {
        one.chart
        for section in SECTIONS
        for one in section.diagnostics
        if one.chart and any(declared(name) is one for name in known)
    }
    assert set(drawn) == expected
    assert {"KL of a step", "Pass at k", "Gradient norm by layers"} <= expected
    assert ">attention</span>" in page
