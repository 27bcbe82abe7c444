"""``bridle eval``, and held-out tasks that are measured while a policy is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridle.engine.embedded import EmbeddedEngine
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.store.reading.queries import Reader
from bridle.trainer.learner.checkpoint import checkpoints
from support.processes import bridle

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

SEEDED = """
import json, os, pathlib, sys, urllib.request, zlib

# The n-th session on a question always draws with the same seed. The verifier counts.
counts = pathlib.Path(__file__).with_name("counts")
nth = counts.read_text().splitlines().count(sys.argv[1])
body = {
    "model": "policy",
    "max_tokens": 4,
    "seed": zlib.crc32(f"{sys.argv[1]} {nth}".encode()),
    "messages": [{"role": "user", "content": sys.argv[1]}],
}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
COUNTING = """
import pathlib


async def check(delivery):
    with pathlib.Path(__file__).with_name("counts").open("a") as counts:
        counts.write(delivery.task.prompt + "\\n")
    return {"reward": float(sum(map(ord, delivery.answer)) % 2)}
"""


def weights(output: Path) -> bytes:
    return (checkpoints(output / "checkpoints")[-1] / "policy" / "model.safetensors").read_bytes()


@pytest.fixture
def arguments(training_arguments: Callable[..., list[str]], tmp_path: Path) -> list[str]:
    """A run of two steps, one session at a time; two of four tasks are held out."""
    given = training_arguments()
    (tmp_path / "agent.py").write_text(SEEDED)
    (tmp_path / "verifier.py").write_text(COUNTING)
    (tmp_path / "counts").touch()
    lines = [
        {"id": f"t{n}", "prompt": f"Question {n}?", "split": "train" if n < 2 else "held_out"}
        for n in range(4)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return [*given, "--steps", "2", "--set", "agent.parallel=1", "--set", "tasks.split=train"]


@pytest.mark.sampled(0)
def test_weights_are_the_same_with_evaluation_on_and_off(
    arguments: list[str], tmp_path: Path
) -> None:
    plain = bridle(*arguments)
    assert plain.returncode == 0, plain.stderr
    without = weights(tmp_path / "out")
    assert not (tmp_path / "out" / "best").exists()

    (tmp_path / "out").rename(tmp_path / "plain")
    (tmp_path / "counts").write_text("")
    held_out = ("--set", "evaluation.every=1", "--set", "evaluation.split=held_out")
    measured = bridle(*arguments, *held_out, "--set", "evaluation.samples=2")
    assert measured.returncode == 0, measured.stderr
    assert weights(tmp_path / "out") == without

    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_bytes())
    assert [one["step"] for one in report["evaluations"]] == [0, 1, 2]
    for one in report["evaluations"]:
        assert 0 <= one["reward_low"] <= one["reward"] <= one["reward_high"] <= 1
        assert {"pass_at_1", "pass_at_2", "mean_at_2"} <= set(one)
    best = json.loads((out / "best" / "evaluation.json").read_bytes())
    assert best["reward"] == max(one["reward"] for one in report["evaluations"])
    kept = (out / "best" / "model.safetensors").read_bytes()
    if best["version"] == 2:
        assert kept == weights(out)
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out reward" in measured.stdout
    assert {"prepare", "run", "verify"} <= set(report["stage_seconds"])
    assert report["stage_seconds"]["run"] > 0
    assert "a session on average: " in measured.stdout
    with Reader(str(out / "bridle.db")) as reader:
        (run,) = reader.runs("eval")
        sessions = list(reader.sessions(run=run.id))
    assert len(sessions) == 3 * 2 * 2
    assert {one.labels["evaluates"] for one in sessions} == {0, 1, 2}

    by_version = ("--set", "by=version", "--set", "k=[2]", "--json")
    told = bridle("eval", "--store", str(out / "bridle.db"), "--run", run.id, *by_version)
    figures = json.loads(told.stdout)["version"]
    assert [figures[name]["pass_at"]["2"]["value"] for name in ("0", "1", "2")] == [
        one["pass_at_2"] for one in report["evaluations"]
    ]


def test_a_run_with_given_services_measures_held_out_tasks(
    arguments: list[str], tmp_path: Path
) -> None:
    policy, store, out = tmp_path / "policy", str(tmp_path / "bridle.db"), tmp_path / "out"
    first = arguments.index("--agent")
    with (
        EmbeddedEngine(policy) as engine,
        ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=policy)) as proxy,
    ):
        done = bridle(
            *("train", "--policy", str(policy), "--out", str(out)),
            *("--set", f"services.store={store}"),
            *("--engine-url", engine.base_url, "--proxy-url", proxy.base_url),
            *arguments[first : first + 6],
            *(
                "--set",
                "tasks.split=train",
                "--steps",
                "1",
                "--set",
                "groups.per_step=1",
                "--set",
                "groups.size=4",
            ),
            *("--set", "agent.parallel=1"),
            *("--set", "evaluation.every=1", "--set", "evaluation.split=held_out"),
            *("--set", "evaluation.success=0"),
        )
    assert done.returncode == 0, done.stderr
    with Reader(store) as reader:
        (trained,), (measured,) = reader.runs("train"), reader.runs("eval")
        steps = [one.step for one in reader.metrics(trained.id, "evaluation/reward")]
        passed = [one.value for one in reader.metrics(trained.id, "evaluation/pass_at_1")]
        sessions = list(reader.sessions(run=measured.id))
    assert passed == [1.0, 1.0], "no reward is below 0"
    assert steps == [-1, 0], "before the first step, and after it"
    assert {str(one.task_id) for one in sessions} == {"t2", "t3"}
    assert sorted(one.labels["evaluates"] for one in sessions) == [0, 0, 1, 1]
    assert (out / "best" / "model.safetensors").exists()


def test_recordings_are_not_measured_on_tasks(arguments: list[str], tmp_path: Path) -> None:
    refused = bridle(
        *("train", "--from-store", str(tmp_path / "bridle.db")),
        *("--policy", str(tmp_path / "policy"), "--out", str(tmp_path / "out")),
        *("--set", "evaluation.every=1"),
    )
    assert refused.returncode == 2
    assert "evaluation.every runs an agent, and --from-store has none" in refused.stderr


def test_tasks_that_are_trained_on_are_not_held_out(arguments: list[str], tmp_path: Path) -> None:
    refused = bridle(*arguments, "--set", "evaluation.every=1", "--set", "evaluation.split=train")
    assert refused.returncode == 2
    assert "the held-out tasks are those that are trained on" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_policy_is_served_and_measured_by_one_command(
    arguments: list[str], tmp_path: Path
) -> None:
    agent = arguments[arguments.index("--agent") + 1]
    done = bridle(
        *("eval", "--agent", agent, "--tasks", str(tmp_path / "tasks.jsonl")),
        *("--verifier", f"{tmp_path / 'verifier.py'}:check", "--samples", "3"),
        *("--policy", str(tmp_path / "policy"), "--out", str(tmp_path / "measured")),
        *("--set", "plot=true"),
    )
    assert done.returncode == 0, done.stderr
    assert "pass@1" in done.stdout
    assert "pass@3" in done.stdout
    report = json.loads((tmp_path / "measured" / "report.json").read_bytes())
    assert (report["all"]["tasks"], report["all"]["attempts"]) == (4, 12)
    assert (tmp_path / "measured" / "eval.png").read_bytes().startswith(b"\x89PNG")
    store = str(tmp_path / "measured" / "bridle.db")
    again = json.loads(bridle("eval", "--store", store, "--set", "by=task", "--json").stdout)
    assert again["all"]["mean_at"] == report["all"]["mean_at"]
    assert len(again["task"]) == 4
    nobody = bridle("eval", "--store", store, "--set", 'sources=["operator"]')
    assert nobody.returncode == 1
    assert "no session with a verdict" in nobody.stderr
    without = bridle("eval", "--agent", agent)
    assert "name --tasks" in without.stderr
