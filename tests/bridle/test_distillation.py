"""A run whose settings name a teacher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bridle.engine.contract.tokenizer import TokenizerNotRead
from bridle.engine.embedded import EmbeddedEngine
from bridle.errors import UsageError
from bridle.run.distillation import informer, require_teacher, teaching
from bridle.run.training import require_parts
from bridle.store.reading.queries import Reader
from bridle.trainer.config import DistillationConfig, GrpoConfig
from bridle.trainer.credit.distillation import TeacherUnreachable
from bridle.trainer.credit.privileged import plain
from bridle.trainer.policy.model import load_policy, save_policy
from support.processes import bridle

URL = "http://127.0.0.1:9"


def test_without_a_url_there_is_no_teacher() -> None:
    require_teacher(DistillationConfig(key_variable="NOT_SET_ANYWHERE"))
    with teaching(DistillationConfig()) as teacher:
        assert teacher is None


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (DistillationConfig(url="teacher:8000"), "distillation.url: 'teacher:8000' is not an HTTP"),
        (DistillationConfig(url=URL, key_variable="TEACHER_KEY"), "environment has no TEACHER_KEY"),
        (DistillationConfig(url=URL, teacher="ema"), "an average of the policy: leave out one"),
        (DistillationConfig(context="hint"), "context needs a teacher: set distillation.url, or"),
        (DistillationConfig(teacher="ema", context="hind"), "no context 'hind': name FILE.py:NAME"),
        (
            DistillationConfig(teacher="ema", context="hint", options={"hint": {"feld": "a"}}),
            "the context 'hint' has no option 'feld', but field",
        ),
        (
            DistillationConfig(teacher="ema", context="hint", options={"hind": {}}),
            "options are for 'hind', which is none of hint",
        ),
    ],
)
def test_a_teacher_that_cannot_be_asked_ends_the_run_before_it_begins(
    config: DistillationConfig, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UsageError, match=told):
        require_parts(GrpoConfig(distillation=config))


def test_an_average_needs_no_url_and_a_context_the_policys_tokenizer(tmp_path: Path) -> None:
    averaged = DistillationConfig(teacher="ema", context="demonstration")
    require_parts(GrpoConfig(distillation=averaged))
    with teaching(averaged) as teacher:
        assert teacher is None
    assert informer(DistillationConfig(), tmp_path) is plain
    with pytest.raises(TokenizerNotRead, match="no tokenizer in"):
        informer(averaged, tmp_path)


def test_a_teacher_is_asked_for_its_models_first() -> None:
    with pytest.raises(TeacherUnreachable, match=URL), teaching(DistillationConfig(url=URL)):
        pytest.fail("the run began")


@pytest.mark.loop
@pytest.mark.usefixtures("warm_start")
@pytest.mark.sampled(0)
def test_sessions_are_taught_live_and_from_recordings_alike(
    training_arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> None:
        done = bridle(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.setenv("TEACHER_KEY", "a-key")
    live = training_arguments()
    policy, store = tmp_path / "policy", tmp_path / "out" / "bridle.db"
    settings = tmp_path / "settings.toml"
    surer = load_policy(policy)
    with torch.no_grad():
        surer.get_input_embeddings().weight.mul_(40)
    save_policy(surer, tmp_path / "teacher", policy)
    with EmbeddedEngine(tmp_path / "teacher", api_key="a-key") as engine:
        settings.write_text(
            '[training.advantages]\nbaseline = "none"\n'
            f'[training.distillation]\nurl = "{engine.base_url}"\nkey_variable = "TEACHER_KEY"\n'
        )
        run(
            *(*live, "--steps", "1", "--set", f"training.distillation.url={engine.base_url}"),
            *("--set", "training.distillation.key_variable=TEACHER_KEY"),
            *("--set", "training.advantages.baseline=none"),
        )
        run(
            *("train", "--from-store", str(store), "--policy", str(policy)),
            *(
                "--config",
                str(settings),
                "--set",
                "groups.per_step=2",
                "--out",
                str(tmp_path / "again"),
            ),
        )
    with Reader(str(store)) as reader:
        runs = [
            dict((m.name, m.value) for m in reader.metrics(run.id)) for run in reader.runs("train")
        ]
        stored = [reader.run(run.id).config for run in reader.runs("train")]
    assert len(runs) == 2
    for metrics in runs:
        assert metrics["distillation/tokens"] == metrics["tokens/trained"] > 0
        assert metrics["distillation/gap"] < -0.01
    assert "a-key" not in str(stored)
    assert "TEACHER_KEY" in str(stored)
