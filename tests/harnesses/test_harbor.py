"""Test that a Harbor task gets nothing of the operator's machine that was not named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bridle.harnesses.permissions import Permissions
from bridle.harnesses.tasks.harbor.loader import harbor_task, harbor_tasks
from bridle.harnesses.tasks.task import TaskError

CONFIG = """
schema_version = "1.0"
[environment]
docker_image = "debian:12"
{environment}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task whose files a test may change."""
    folder = tmp_path / "tasks" / "one"
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").write_text("exit 0\n")
    (folder / "instruction.md").write_text("Say yes.\n")
    (folder / "task.toml").write_text(CONFIG.format(environment=""))
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("the operator's")
    return path


def taking(folder: Path, value: str) -> dict[str, str]:
    """Return the environment of the task with a variable of this value."""
    (folder / "task.toml").write_text(CONFIG.format(environment=f'env = {{ TOKEN = "{value}" }}'))
    task = harbor_task(folder, "suite")
    assert task.container is not None
    return dict(task.container.environment)


def test_a_variable_that_the_user_did_not_name_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_ADMIN_KEY", "the operator's")
    with pytest.raises(TaskError, match=r"tasks\.env") as refused:
        taking(folder, "${BRIDLE_ADMIN_KEY}")
    assert "the operator's" not in str(refused.value)
    assert taking(folder, "${BRIDLE_ADMIN_KEY:-none}") == {"TOKEN": "none"}


def test_a_variable_that_the_user_named_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_TASK_ENV", "")
    monkeypatch.setenv("MINE", "1")
    Permissions(task_env=("MINE", "MISSING")).grant()
    assert taking(folder, "${MINE}") == {"TOKEN": "1"}
    with pytest.raises(TaskError, match="MISSING, which is not set"):
        taking(folder, "${MISSING}")


@pytest.mark.parametrize(
    "place", ["instruction.md", "task.toml", "tests/key", "environment/key", "steps/one/workdir"]
)
def test_a_link_that_leads_out_of_the_task_is_refused(
    folder: Path, secret: Path, place: str
) -> None:
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    with pytest.raises(TaskError, match="a link that leads out"):
        harbor_task(folder, "suite")


def test_a_link_inside_of_the_task_is_followed(folder: Path) -> None:
    (folder / "instruction.md").rename(folder / "tests" / "text.md")
    (folder / "instruction.md").symlink_to("tests/text.md")
    assert harbor_task(folder, "suite").prompt == "Say yes.\n"


def test_a_pipe_in_a_task_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "tests" / "pipe")
    with pytest.raises(TaskError, match="no regular file"):
        harbor_task(folder, "suite")


def test_an_instruction_of_many_megabytes_is_refused(folder: Path) -> None:
    (folder / "instruction.md").write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(TaskError, match="at most 1 MiB"):
        harbor_task(folder, "suite")


def test_a_task_that_cannot_be_run_is_left_out_of_its_dataset_by_name(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    several = folder.parent / "several"
    shutil.copytree(folder, several)
    (several / "environment" / "docker-compose.yaml").write_text("secrets: {}\n")

    (only,) = harbor_tasks(str(folder.parent))

    assert only.id == "one"
    (logged,) = caplog.messages
    assert logged.startswith("task_left_out: ")
    assert str(several) in logged
    for path in (several, folder.parent):
        if path == folder.parent:
            shutil.rmtree(folder)
        with pytest.raises(TaskError, match="has 'secrets'"):
            list(harbor_tasks(str(path)))


def test_a_task_whose_steps_are_not_named_is_left_out_of_its_dataset(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unnamed = folder.parent / "unnamed"
    shutil.copytree(folder, unnamed)
    (unnamed / "steps" / "first").mkdir(parents=True)
    (unnamed / "instruction.md").rename(unnamed / "steps" / "first" / "instruction.md")

    (only,) = harbor_tasks(str(folder.parent))

    assert only.id == "one"
    (logged,) = caplog.messages
    assert logged == (
        f"task_left_out: {unnamed} has steps that its task.toml does not name: add [[steps]]"
    )
