"""The pinned Python harnesses, each in an environment of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bridle.harnesses import install
from bridle.harnesses.sandboxes import NotLaunchable

PINS = sorted(install.PYTHON.glob("*.txt"))


@pytest.mark.parametrize("pins", PINS, ids=lambda path: path.stem)
def test_every_package_is_pinned_to_one_version_and_no_registry_is_named(pins: Path) -> None:
    lines = pins.read_text().splitlines()

    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert any(line.startswith(f"{pins.stem}==") for line in lines)


def test_the_pinned_executable_comes_before_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, pinned = tmp_path / "bin", tmp_path / ".venv-some-harness/bin"
    for directory in (system, pinned):
        directory.mkdir(parents=True)
        (directory / "run").write_text("#!/bin/sh\n")
        (directory / "run").chmod(0o755)
    monkeypatch.setattr(install, "PYTHON", tmp_path)
    monkeypatch.setenv("PATH", str(system))

    assert install.find_python_harness("some-harness", "run") == str(pinned / "run")
    assert install.find_python_harness("another", "run") == str(system / "run")


def test_another_environments_python_does_not_pass_for_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "PYTHON", tmp_path)

    with pytest.raises(NotLaunchable, match="run harnesses/python/install"):
        install.find_python_harness("openai-agents", "python")


def test_the_version_of_a_pinned_harness_is_known_and_another_packages_is_not() -> None:
    assert str(install.pinned_version("@openai/codex")).startswith("0.")
    assert str(install.pinned_version("mini-swe-agent")).startswith("2.")
    assert install.pinned_version("emacs") is None
    assert install.pinned_version("../python/mini-swe-agent") is None


def test_the_installer_refuses_what_it_does_not_know() -> None:
    ended = subprocess.run([install.PYTHON / "install", "--all"], capture_output=True, text=True)

    assert (ended.returncode, ended.stderr) == (2, "usage: harnesses/python/install\n")


def test_the_installer_makes_an_environment_anew_only_when_its_pins_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "install"
    shutil.copy(install.PYTHON / "install", script)
    pins, marker = tmp_path / "nothing.txt", tmp_path / ".venv-nothing/marker"
    # A stand-in for the interpreter: makes an environment whose python accepts whatever it is told.
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\nprintf "#!/bin/sh\\n" >"$3/bin/python"\n'
        'chmod +x "$3/bin/python"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(fake))
    pins.write_text("one==1\n")
    subprocess.run([script], check=True)
    marker.touch()

    subprocess.run([script], check=True)
    assert marker.exists()
    pins.write_text("one==2\n")
    subprocess.run([script], check=True)
    assert not marker.exists()
