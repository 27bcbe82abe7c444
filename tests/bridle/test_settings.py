"""A run's settings: from a file, over it the options that were named, and what cannot be."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bridle.cli import program
from bridle.cli.commands.train import FLAGS
from bridle.cli.settings import configured
from bridle.run.config import AgentConfig, PolicyConfig, RunConfig, TasksConfig
from bridle.run.settings import SettingsError, settings_of
from bridle.trainer.config import GrpoConfig, SftConfig

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
NEEDED = ("--policy .", "--agent a", "--tasks t", "--verifier number")


@pytest.fixture
def settled(tmp_path: Path) -> Callable[..., Any]:
    """Combine options and a file's text into a config."""

    def settle(
        text: str | None, *options: str, kind: type = RunConfig, needed: tuple[str, ...] = NEEDED
    ) -> Any:
        found: list[Any] = []

        def command(config: Any) -> None:
            found.append(config)

        flags = FLAGS if kind is RunConfig else {"--loss": "loss"}
        given = [*options, *(needed if kind is RunConfig else ())]
        arguments = [word for each in given for word in each.split()]
        if text is not None:
            (tmp_path / "settings.toml").write_text(text)
            arguments += ["--config", str(tmp_path / "settings.toml")]
        only = typer.Typer()
        only.command()(configured(kind, flags)(command))
        typer.main.get_command(only)(arguments, standalone_mode=False)
        return found[0]

    return settle


@pytest.mark.parametrize(
    ("options", "alone", "shared"),
    [
        (("--from-store s.db",), True, "s.db"),
        (("--from-store s.db", "--set recordings.share=0.5"), False, None),
        (("--set recordings.share=0.5",), False, None),
    ],
)
def test_a_run_has_a_store_of_its_own_unless_it_trains_recordings_alone(
    settled: Callable[..., Any], options: tuple[str, ...], alone: bool, shared: str | None
) -> None:
    config = settled(None, *options)
    assert (config.recordings.alone, config.shared_store) == (alone, shared)


def test_without_a_file_the_options_defaults_hold(settled: Callable[..., Any]) -> None:
    assert settled(None).training.optimizer.learning_rate == "auto"
    tuned = settled(None, kind=SftConfig)
    assert (tuned.optimizer.warmup_steps, tuned.optimizer.schedule) == (10, "cosine")
    assert tuned == SftConfig()


def test_a_file_wins_over_defaults_and_a_named_option_over_the_file(
    settled: Callable[..., Any],
) -> None:
    text = "[training]\nsteps = 7\nseconds = 30\n[training.optimizer]\nlearning_rate = 1e-4\n"
    text += 'warmup_steps = 3\n[training.loss]\nname = "gspo"\nkl_coefficient = 0.01\n'
    text += '[training.filters.outcomes]\ntimeout = "train"\n'
    found = settled(text).training
    assert (found.steps, found.seconds) == (7, 30)
    assert (found.optimizer.learning_rate, found.optimizer.warmup_steps) == (1e-4, 3)
    assert (found.loss.name, found.loss.kl_coefficient) == ("gspo", 0.01)
    assert found.loss.clip_high == GrpoConfig().loss.clip_high
    assert found.filters.outcomes["timeout"] == "train"
    assert found.filters.outcomes["infrastructure"] == "exclude"
    sets = ("--set training.optimizer.learning_rate=1e-6", "--set training.compute.device=cpu")
    over = settled(text, "--steps 100", *sets, "--set training.seconds=").training
    assert (over.steps, over.seconds, over.optimizer.learning_rate) == (100, None, 1e-6)
    assert (over.optimizer.warmup_steps, over.compute.device) == (3, "cpu")


def test_a_value_is_read_as_its_setting_is_declared(settled: Callable[..., Any]) -> None:
    urls = ("--engine-url http://a", "--engine-url http://b", "--proxy-url http://c")
    found = settled(None, *urls, "--set agent.name=7", "--set tasks.split=1", "--set groups.size=3")
    assert found.services.engine_urls == ("http://a", "http://b")
    assert (found.agent.name, found.tasks.split, found.groups.size) == ("7", "1", 3)
    assert settled(None, '--set tasks.split="a"').tasks.split == "a"
    sinks = settled(None, '--set training.sinks=["wandb"]').training.sinks
    assert sinks == ("wandb",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepz = 1", "no setting 'stepz', but steps, seconds"),
        ("loss.clip = 0.1", r"loss\]: there is no setting 'clip', but name, clip_low"),
        ("loss.clip_low = -0.1", "training.loss.clip_low: Expected `float` >= 0.0"),
        ("optimizer.betas = [0.9, 1.0]", r"optimizer.betas\[1\]: Expected `float` < 1.0"),
        ("publish.tolerance = -1", "publish.tolerance: Expected `float` >= 0.0"),
        ("minibatches = 0", "training.minibatches: Expected `int` >= 1"),
        ("loss = 3", "training.loss: Expected `object`, got `int`"),
        ("advantages.options.gigpo = 1", r"advantages.options.*Expected `object`, got `int`"),
        ('compute = {precision = "float16"}', "Invalid enum value 'float16'"),
        ("steps = ", "Invalid value"),
    ],
)
def test_what_is_no_setting_is_named(settled: Callable[..., Any], text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=f"settings.toml.*{told}"):
        settled(f"[training]\n{text}")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_command_ends_with_a_line_before_anything_starts(command: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("stepz = 1")
    out = str(tmp_path / "out")
    options = ["--policy", str(tmp_path), "--out", out, "--config", f"{tmp_path}/settings.toml"]
    options += ["--agent", "a", "--tasks", "t"] if command == "train" else []
    done = CliRunner().invoke(program.app, [command, *options])
    assert done.exit_code == 2
    assert "there is no setting 'stepz'" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


RUN_FILE = """
[tasks]
source = "tasks.jsonl"
verifier = "exact"
[agent]
name = "agent.py"
parallel = 2
[policy]
model = "policy"
[groups]
size = 4
[training]
steps = 7
[training.optimizer]
warmup_steps = 3
"""


def test_a_run_is_the_same_value_from_options_a_file_and_a_program(
    settled: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    loaded = RunConfig.load(tmp_path / "run.toml", ["training.loss.name=gspo", "groups.size=3"])
    options = ("--set training.loss.name=gspo", "--set groups.size=3")
    assert settled(RUN_FILE, *options, needed=()) == loaded
    assert loaded.training.loss.name == "gspo"
    assert (loaded.groups.size, loaded.agent.parallel, loaded.training.steps) == (3, 2, 7)
    assert loaded.training.optimizer.warmup_steps == 3
    assert loaded.training.optimizer.learning_rate == "auto"


def test_a_commands_defaults_are_those_of_a_program(settled: Callable[..., Any]) -> None:
    built = RunConfig(TasksConfig("t", "number"), AgentConfig("a"), PolicyConfig("."))
    assert settled(None) == built


def test_a_setting_that_a_run_needs_is_named(settled: Callable[..., Any]) -> None:
    with pytest.raises(SettingsError, match=r"policy\.model is not set"):
        settled(None, needed=NEEDED[1:])
    with pytest.raises(SettingsError, match="'nonsense' is not NAME=VALUE"):
        settled(None, "--set nonsense")
    with pytest.raises(SettingsError, match="there is no setting 'sizes'"):
        settled(None, "--set groups.sizes=1")


@pytest.mark.parametrize("command", ["train", "sft", "rollout", "eval"])
def test_a_command_has_a_dozen_options_and_sets_the_rest(command: str) -> None:
    options = [one for one in program.loaded(command).params if one.name != "help"]
    assert len(options) <= 12
    assert {"--config", "--set"} <= {name for one in options for name in one.opts}


def test_every_option_of_a_setting_is_helped_by_the_settings_own_words() -> None:
    known = {one.name: one for one in settings_of(RunConfig)}
    shown = {option: one.help for one in program.loaded("train").params for option in one.opts}
    for flag, name in FLAGS.items():
        assert len(shown[flag]) > 10
        assert known[name].doc.replace("``", "").startswith(shown[flag].rstrip("."))


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("sft --epochs 3", "--set epochs=VALUE"),
        ("train --learning-rate 1", "--set training.optimizer.learning_rate=VALUE"),
        ("train --groups 1", "--set groups.per_step=VALUE"),
        ("train --timeout 1", "--set agent.timeout_s=VALUE"),
        ("train --minutes 1", "--set training.seconds=VALUE"),
        ("train --proxy http://p", "--proxy-url"),
        ("train --store s", "--set services.store=VALUE or --from-store"),
        ("sft --settings s", "--config"),
        ("rollout --directory d", "--set agent.directory=VALUE"),
        ("eval --source operator", "--tasks or --set sources=VALUE"),
        ("sft --batch-size 3", "--set batch_size=VALUE"),
        ("sft --model m", "--policy"),
        ("doctor --policy p", "--model"),
    ],
)
def test_an_option_that_is_a_setting_now_is_refused_with_the_new_spelling(
    words: str, instead: str
) -> None:
    _, option, *_ = words.split()
    done = CliRunner().invoke(program.app, words.split())
    assert done.exit_code == 2
    assert done.stderr == f"bridle: there is no option {option}: use {instead}\n"


def test_another_unknown_option_is_an_unknown_option() -> None:
    for command in ("train", "sessions"):
        done = CliRunner().invoke(program.app, [command, "--xyzzy", "1"])
        assert (done.exit_code, "No such option: --xyzzy" in done.stderr) == (2, True)


def test_the_page_shows_every_setting_with_what_holds_without_a_file(
    settled: Callable[..., Any],
) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert settled(text) == settled(None)
    lines = [line[2:] if re.match(r"# \w+ = ", line) else line for line in text.splitlines()]
    shown = tomllib.loads("\n".join(lines))
    assert names(shown["training"]) == settings(GrpoConfig())


def names(table: dict[str, Any]) -> set[str]:
    found = set()
    for name, value in table.items():
        inner = name not in (
            "options",
            "outcomes",
            "reward_weights",
            "role_rewards",
        ) and isinstance(value, dict)
        found |= {f"{name}.{each}" for each in names(value)} if inner else {name}
    return found


def settings(config: Any) -> set[str]:
    found = set()
    for each in fields(config):
        value = getattr(config, each.name)
        inner = settings(value) if is_dataclass(value) else {""}
        found |= {f"{each.name}.{name}".rstrip(".") for name in inner}
    return found
