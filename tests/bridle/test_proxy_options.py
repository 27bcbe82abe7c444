"""Test that options of ``bridle proxy`` reach the writer, and that refusals take one line."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bridle.extras import install_command
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import Budget, ProxySettings


@pytest.fixture(autouse=True)
def signals_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.cli.commands.proxy.stop_signals", threading.Event)


@pytest.mark.parametrize(("given", "level"), [((), 1), (("--set", "synchronous=FULL"), 2)])
def test_a_commit_waits_for_the_disk_when_that_is_asked(
    bridle: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: tuple[str, ...],
    level: int,
) -> None:
    seen: list[Any] = []

    class Looked(ProxyServer):
        def __init__(self, settings: ProxySettings, **options: Any) -> None:
            super().__init__(settings, **options)
            seen.append(self)

    def look(_: threading.Event) -> None:
        services = seen[0]._server.config.app.services
        with services.writer._engine.connect() as connection:
            seen.append(connection.exec_driver_sql("PRAGMA synchronous").scalar())

    monkeypatch.setattr("bridle.proxy.server.ProxyServer", Looked)
    monkeypatch.setattr("bridle.cli.commands.proxy.wait_for", look)
    argv = ("--engine", "http://127.0.0.1:9", "--store", str(tmp_path / "s.db"), "--port", "0")
    done = bridle("proxy", *argv, *given)
    assert done.exit_code == 0, done.output
    assert seen[1] == level


def test_an_engine_that_is_not_there_is_told_at_the_start(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bridle.cli.commands.proxy.wait_for", lambda _: None)
    monkeypatch.setattr("bridle.cli.commands.proxy._PATIENCE_S", 0.0)
    argv = ("--engine", "http://127.0.0.1:9/v1", "--store", str(tmp_path / "s.db"))
    done = bridle("proxy", *argv, "--port", "0")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == (
        "  upstream    http://127.0.0.1:9/v1: nothing listens there yet: "
        "calls fail until something does"
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.sampled(2)
def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path, workers: int) -> None:
    argv = ("--tokenizer", str(tmp_path), "--workers", str(workers))
    done = not_starting(tmp_path, *argv)
    assert f"no tokenizer in {tmp_path}: No such file" in done.stderr
    last = done.stderr.splitlines()[-1]
    if workers == 1:
        assert last.startswith(f"bridle: no tokenizer in {tmp_path}: ")
    else:
        assert last == "bridle: the proxy's workers did not start; see the log"


def test_traces_without_their_extra_name_it(tmp_path: Path) -> None:
    done = not_starting(tmp_path, "--set", "tracing=true", without="opentelemetry")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"bridle: traces need the extra otel: {install_command('otel')} (")


def not_starting(
    tmp_path: Path, *options: str, without: str = "nothing"
) -> subprocess.CompletedProcess[str]:
    """``bridle proxy`` that ends by itself, where the package ``without`` is not installed."""
    run = f"import sys; sys.modules[{without!r}] = None; from bridle.cli.program import app; app()"
    argv = ("--engine", "http://127.0.0.1:9", "--store", str(tmp_path / "s.db"), "--port", "0")
    done = subprocess.run(
        [sys.executable, "-c", run, "proxy", *argv, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_role_is_sent_only_to_a_model_that_is_named(
    bridle: Callable[..., Result], tmp_path: Path
) -> None:
    argv = ["--engine", "http://127.0.0.1:9", "--store", str(tmp_path / "s.db"), "--port", "0"]
    argv += ["--set", 'other_models.judge-*.urls=["http://127.0.0.1:8"]']
    done = bridle("proxy", *argv, "--set", "role_models.subagent=jugde-1")
    assert done.exit_code == 2
    assert "role model subagent=jugde-1: no policy or other model is jugde-1" in done.output


def test_further_policies_are_announced_and_a_role_may_be_sent_to_one(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bridle.cli.commands.proxy.wait_for", lambda _: None)
    monkeypatch.setattr("bridle.cli.commands.proxy._PATIENCE_S", 0.0)
    argv = ["--engine", "http://127.0.0.1:9", "--store", str(tmp_path / "s.db"), "--port", "0"]
    argv += ["--set", 'policies.worker=["http://127.0.0.1:7", "http://127.0.0.1:8"]']
    done = bridle("proxy", *argv, "--set", "role_models.subagent=worker")
    assert done.exit_code == 0, done.output
    served = "  policy      worker, served by http://127.0.0.1:7, http://127.0.0.1:8"
    assert served in done.stdout.splitlines()
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("  upstream")]
    assert len(verdicts) == 3, "every engine is examined"


def test_a_dialect_that_cannot_be_served_ends_the_command_before_there_is_a_store(
    bridle: Callable[..., Result], tmp_path: Path
) -> None:
    store, file = tmp_path / "s.db", tmp_path / "mine.py"
    file.write_text("MINE = 'chat'")
    argv = ("proxy", "--engine", "http://127.0.0.1:9", "--store", str(store))
    done = bridle(*argv, "--set", f'dialects=["{file}:MINE"]')
    assert done.exit_code == 2
    assert "is no dialect but a str: name a Dialect" in done.output
    assert bridle(*argv, "--set", 'dialects=["nothing"]').exit_code == 2
    assert not store.exists()


def test_settings_of_a_file_reach_the_proxy(
    bridle: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[ProxySettings] = []

    class Looked(ProxyServer):
        def __init__(self, settings: ProxySettings, **options: Any) -> None:
            seen.append(settings)
            super().__init__(settings, **options)

    monkeypatch.setattr("bridle.proxy.server.ProxyServer", Looked)
    monkeypatch.setattr("bridle.cli.commands.proxy.wait_for", lambda _: None)
    monkeypatch.setenv("JUDGES_KEY", "a key that is long enough")
    file = tmp_path / "proxy.toml"
    file.write_text(
        """
        seal_idle_s = 5
        budget = { calls = 7 }
        limits = { choices = 3, retries = 1 }

        [other_models."judge-*"]
        urls = ["http://127.0.0.1:8"]
        key_variable = "JUDGES_KEY"
        """
    )
    argv = ["--engine", "http://127.0.0.1:9", "--store", str(tmp_path / "s.db"), "--port", "0"]
    argv += ["--json", "--config", str(file), "--set", "model=m", "--set", "limits.choices=4"]
    done = bridle("proxy", *argv)
    assert done.exit_code == 0, done.output
    (settings,) = seen
    assert (settings.model, settings.seal_idle_s, settings.log_format) == ("m", 5.0, "text")
    assert settings.budget == Budget(calls=7)
    assert (settings.limits.choices, settings.limits.retries) == (4, 1)
    assert settings.other_models["judge-*"].api_key == "a key that is long enough"


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("limits.choises=3", "there is no setting 'choises'"),
        ("limits.choices=three", "limits.choices: Expected `int`"),
        ("limits.choices=-1", "choices is less than 0"),
        ("budget.call=1", "budget: Object contains unknown field `call`"),
        ('other_models.j={urls=["http://j"], key_variable="NONE"}', "the environment has no NONE"),
        ("other_models.j={urls=[]}", "other_models.j has no URL"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_a_line(
    bridle: Callable[..., Result], tmp_path: Path, assignment: str, reason: str
) -> None:
    argv = ("--engine", "http://127.0.0.1:9", "--store", str(tmp_path / "s.db"))
    done = bridle("proxy", *argv, "--set", assignment)
    assert done.exit_code == 2
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--seal-idle", "seal_idle_s"),
        ("--otel", "tracing"),
        ("--memory", "limits.memory_bytes"),
        ("--budget-seconds", "budget"),
        ("--role-model", "role_models"),
    ],
)
def test_an_option_that_is_a_setting_names_it(
    bridle: Callable[..., Result], option: str, setting: str
) -> None:
    done = bridle("proxy", "--engine", "http://127.0.0.1:9", option, "1")
    assert done.exit_code == 2
    assert f"there is no option {option}: use --set {setting}=VALUE" in done.stderr
