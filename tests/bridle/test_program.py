"""The program starts fast, and lists each command by the command's own words."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bridle.cli import program

Bridle = Callable[..., Result]


@pytest.mark.parametrize("name", program.COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each_ones_help(name: str) -> None:
    command = program.loaded(name)
    first = " ".join(command.help.split("\n\n")[0].split())
    assert first == program.COMMANDS[name].summary


def test_the_list_of_commands_has_a_line_for_each_and_fits_a_screen(bridle: Bridle) -> None:
    lines = bridle("--help").output.splitlines()
    assert len(lines) <= 45
    panels = [entry for panel in program.PANELS.values() for entry in panel.items()]
    for name, entry in panels:
        (line,) = (one for one in lines if one.split()[:1] == [name])
        assert line.split(maxsplit=1)[1] == entry.summary
    rare = " ".join(lines[-2:])
    assert all(re.search(rf"\b{name}\b", rare) for name in program.RARE)


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below ``group`` with its path."""
    for name, command in group.commands.items():
        yield (*path, name), command
        yield from commands(command, *path, name) if hasattr(command, "commands") else ()


def test_every_help_text_prints_as_it_is_written(
    bridle: Bridle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 2000)  # a text on one line each
    loaded = {name: program.loaded(name) for name in program.COMMANDS}
    tree = [((name,), command) for name, command in loaded.items()]
    for name, command in loaded.items():
        tree += commands(command, name) if hasattr(command, "commands") else ()
    texts = 0
    shown = {path: " ".join(bridle(*path, "--help").output.split()) for path, _ in tree}
    for path, command in tree:
        for part in (command, *command.params):
            for paragraph in (getattr(part, "help", None) or "").split("\n\n"):
                assert " ".join(paragraph.split()) in shown[path], path
                texts += 1
    assert not any("<bool>" in text for text in shown.values())
    assert texts > 300


def test_a_command_has_at_most_a_dozen_options() -> None:
    loaded = {name: program.loaded(name) for name in program.COMMANDS}
    tree = [((name,), command) for name, command in loaded.items()]
    for name, command in loaded.items():
        tree += commands(command, name) if hasattr(command, "commands") else ()
    options = {
        path: sum(one.param_type_name == "option" for one in command.params)
        for path, command in tree
    }
    assert {path: count for path, count in options.items() if count > 12} == {}


def test_help_takes_less_than_half_a_second_and_imports_no_command() -> None:
    script = (
        "import sys; from bridle.cli.program import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'sqlalchemy', 'numpy', 'pyarrow', 'httpx', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    fastest = min(_cpu_seconds(script) for _ in range(3))
    assert fastest <= 0.5


def _cpu_seconds(script: str) -> float:
    """The processor's time, which other jobs on this machine do not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "sessions" in done.stdout
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_mistyped_command_is_answered_with_the_one_that_was_meant(bridle: Bridle) -> None:
    refused = bridle("sesions")
    assert refused.exit_code == 2
    assert "Did you mean 'sessions'?" in refused.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    words = {
        "bash": {"COMP_WORDS": "bridle show --js", "COMP_CWORD": "2"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "bridle show --js"},
        "fish": {
            "_TYPER_COMPLETE_ARGS": "bridle show --js",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    }
    done = subprocess.run(
        [sys.executable, "-c", "from bridle.cli.program import app; app(prog_name='bridle')"],
        env={**os.environ, "_BRIDLE_COMPLETE": f"complete_{shell}", **words[shell]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "--json" in done.stdout, done.stderr


def test_an_example_is_copied_once(bridle: Bridle, tmp_path: Path) -> None:
    listed = bridle("examples")
    assert "openai_sdk" in listed.output
    assert "From recorded sessions to an SFT set" in listed.output
    assert "A Harbor task" in listed.output
    copied = bridle("examples", "openai_sdk", "--to", tmp_path)
    assert copied.exit_code == 0
    changed = tmp_path / "openai_sdk/agent.py"
    changed.write_text("mine")
    assert "is there already" in bridle("examples", "openai_sdk", "--to", tmp_path).output
    assert changed.read_text() == "mine"
    assert bridle("examples", "nothing").exit_code == 2
