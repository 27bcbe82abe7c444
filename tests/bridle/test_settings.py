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

from bridle.cli.commands.sft import sft
from bridle.cli.commands.train import train
from bridle.cli.commands.trainer import trainer
from bridle.cli.program import app
from bridle.cli.settings import GRPO, RUN, SFT, chosen
from bridle.run.config import AgentConfig, PolicyConfig, RunConfig, TasksConfig
from bridle.run.settings import SettingsError
from bridle.trainer.config import GrpoConfig, SftConfig

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
URL = "http://127.0.0.1:9"
NEEDED = {
    sft: ("--policy .", "--out o"),
    trainer: ("--policy .", "--out o", f"--engine {URL}", "--agent a", "--tasks t"),
    train: ("--policy .", "--agent a", "--tasks t", "--verifier number", "--out o"),
}


@pytest.fixture
def settled(tmp_path: Path) -> Callable[..., Any]:
    """What a command's options and a file's text come to."""

    def settle(text: str | None, *options: str, command: Any = trainer, needed: Any = None) -> Any:
        kind, names = {
            sft: (SftConfig, SFT),
            trainer: (GrpoConfig, GRPO),
            train: (RunConfig, RUN),
        }[command]
        arguments = [word for option in options for word in option.split()]
        option, parameter = "--settings", "settings_file"
        if command is train:
            option, parameter = "--config", "config_file"
        if text is not None:
            file = tmp_path / "settings.toml"
            file.write_text(text)
            arguments += [option, str(file)]
        needed = NEEDED[command] if needed is None else needed
        arguments += [word for each in needed for word in each.split()]
        of_one = typer.Typer()
        of_one.command()(command)
        parsed = typer.main.get_command(of_one)
        context = parsed.make_context("command", arguments)
        params = context.params
        return chosen(context, kind, names, params[parameter], params.get("assignments") or ())

    return settle


def test_without_a_file_the_options_defaults_hold(settled: Callable[..., Any]) -> None:
    assert settled(None).optimizer.learning_rate == 1e-6
    assert settled(None, "--minutes 2").seconds == 120
    tuned = settled(None, command=sft)
    assert (tuned.optimizer.learning_rate, tuned.optimizer.schedule) == (1e-5, "cosine")
    assert tuned.optimizer.warmup_steps == SftConfig().optimizer.warmup_steps


def test_a_file_wins_over_defaults_and_a_named_option_over_the_file(
    settled: Callable[..., Any],
) -> None:
    text = "steps = 7\nseconds = 30\n[optimizer]\nlearning_rate = 1e-4\nwarmup_steps = 3\n"
    text += '[loss]\nname = "gspo"\nkl_coefficient = 0.01\n[filters.outcomes]\ntimeout = "train"\n'
    found = settled(text)
    assert (found.steps, found.seconds) == (7, 30)
    assert (found.optimizer.learning_rate, found.optimizer.warmup_steps) == (1e-4, 3)
    assert (found.loss.name, found.loss.kl_coefficient) == ("gspo", 0.01)
    assert found.loss.clip_high == GrpoConfig().loss.clip_high
    assert found.filters.outcomes["timeout"] == "train"
    assert found.filters.outcomes["infrastructure"] == "exclude"
    over = settled(text, "--steps 100", "--learning-rate 1e-6", "--minutes 1", "--device cpu")
    assert (over.steps, over.seconds, over.optimizer.learning_rate) == (100, 60, 1e-6)
    assert (over.optimizer.warmup_steps, over.compute.device) == (3, "cpu")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepz = 1", "no setting 'stepz', but steps, seconds"),
        ("[loss]\nclip = 0.1", r"\[loss\]: there is no setting 'clip', but name, clip_low"),
        ("[loss]\nclip_low = -0.1", r">= 0.0 - at `\$.loss.clip_low`"),
        ("[optimizer]\nbetas = [0.9, 1.0]", r"< 1.0 - at `\$.optimizer.betas\[1\]`"),
        ("[publish]\ntolerance = -1", r">= 0.0 - at `\$.publish.tolerance`"),
        (
            "[advantages]\nstep_weight = 1",
            r"\[advantages\]: the setting 'step_weight' is options.gigpo.step_weight now",
        ),
        ("[advantages.options]\ngigpo = 1", r"Expected `object`, got `int` - at .*options"),
        ("minibatches = 0", r">= 1 - at `\$.minibatches`"),
        ("loss = 3", r"Expected `object`, got `int` - at `\$.loss`"),
        ('compute = {precision = "float16"}', "Invalid enum value 'float16'"),
        ("steps = ", "Invalid value"),
    ],
)
def test_what_is_no_setting_is_named(settled: Callable[..., Any], text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=f"settings.toml.*{told}"):
        settled(text)


@pytest.mark.parametrize("command", ["train", "trainer", "sft"])
def test_a_command_ends_with_a_line_before_anything_starts(command: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("stepz = 1")
    out = str(tmp_path / "out")
    file = "--config" if command == "train" else "--settings"
    options = ["--policy", str(tmp_path), "--out", out, file, f"{tmp_path}/settings.toml"]
    options += {
        "train": ["--agent", "a", "--tasks", "t", "--verifier", "number"],
        "trainer": ["--engine", URL, "--agent", "a", "--tasks", "t"],
        "sft": [],
    }[command]
    done = CliRunner().invoke(app, [command, *options])
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
    options = ("--set training.loss.name=gspo", "--group-size 3", "--out o")
    assert settled(RUN_FILE, *options, command=train, needed=()) == loaded
    assert loaded.training.loss.name == "gspo"
    assert (loaded.groups.size, loaded.agent.parallel, loaded.training.steps) == (3, 2, 7)
    assert loaded.training.optimizer.warmup_steps == 3
    assert loaded.training.optimizer.learning_rate == 1e-6


def test_a_commands_defaults_are_those_of_a_program(settled: Callable[..., Any]) -> None:
    built = RunConfig(TasksConfig("t", "number"), AgentConfig("a"), PolicyConfig("."))
    assert settled(None, command=train) == built


def test_a_setting_that_a_run_needs_is_named(settled: Callable[..., Any]) -> None:
    needed = ("--policy .", "--tasks t", "--verifier number", "--out o")
    with pytest.raises(SettingsError, match=r"agent\.name is not set"):
        settled(None, command=train, needed=needed)
    with pytest.raises(SettingsError, match="'nonsense' is not NAME=VALUE"):
        settled(None, "--set nonsense", command=train)
    with pytest.raises(SettingsError, match="there is no setting 'sizes'"):
        settled(None, "--set groups.sizes=1", command=train)


def test_the_page_shows_every_setting_with_what_holds_without_a_file(
    settled: Callable[..., Any],
) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert settled(text) == settled(None)
    lines = [line[2:] if re.match(r"# \w+ = ", line) else line for line in text.splitlines()]
    shown = tomllib.loads("\n".join(lines))
    assert names(shown) == settings(GrpoConfig())


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
