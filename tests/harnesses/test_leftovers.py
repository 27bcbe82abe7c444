"""Test that a session's files are read, copied, tidied and removed inside its folder alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridle.harnesses.sandboxes import LaunchRefused, ProcessSandbox, SandboxLost
from bridle.harnesses.sandboxes.base import Captured
from bridle.harnesses.sandboxes.leftovers import (
    DEPTH,
    copy_folder,
    new_file,
    read_file,
    remove_folder,
    tidy,
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "session"
    (made / "inner").mkdir(parents=True)
    (made / "inner/file").write_text("text")
    (tmp_path / "secret").write_text("secret")
    yield made
    remove_folder(made)


def nest(folder: Path, depth: int) -> None:
    """Folders within each other, deeper than a path can be long."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.fchdir(here)
        os.close(here)


FOREIGN: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "absolute link": lambda path: path.symlink_to("/etc/hostname"),
    "link upwards": lambda path: path.symlink_to("../secret"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "too large": lambda path: path.write_bytes(b"x" * 101),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_file_but_a_small_one_of_the_session_is_read(root: Path, kind: str) -> None:
    FOREIGN[kind](root / "result")
    with pytest.raises(FileNotFoundError):
        read_file(root, root / "result", 100)


def test_a_folder_that_is_a_link_out_is_not_entered(root: Path) -> None:
    (root / "out").symlink_to("..")
    for path in (root / "out/secret", root / "inner/../../secret", root.parent / "secret"):
        with pytest.raises(FileNotFoundError):
            read_file(root, path)


def test_links_within_the_session_are_followed(root: Path) -> None:
    (root / "relative").symlink_to("inner/../inner/file")
    (root / "absolute").symlink_to(root / "inner")
    assert read_file(root, root / "relative") == b"text"
    assert read_file(root, root / "absolute/file") == b"text"


def test_tidying_leaves_regular_files_and_links_inside_alone(root: Path) -> None:
    for number, make in enumerate(FOREIGN.values()):
        make(root / str(number))
    (root / "inside").symlink_to("inner/file")
    (root / "python").symlink_to("/usr/bin/env")
    (root / "closed/deep").mkdir(parents=True)
    (root / "closed/deep/file").write_text("x")
    (root / "closed/deep/file").chmod(0)
    (root / "closed").chmod(0)
    tidy(root, strip=True)
    left = {path.name for path in root.iterdir()}
    assert left == {"inner", "inside", "python", "closed", "5", "6", "4"}
    assert (root / "closed/deep/file").stat().st_mode & 0o600 == 0o600


def test_folders_three_thousand_deep_are_cut_and_removed(root: Path) -> None:
    nest(root, 3000)
    tidy(root, strip=False)
    assert max(len(Path(where).parts) for where, _, _ in os.walk(root)) <= (len(root.parts) + DEPTH)
    nest(root / "inner", 3000)
    remove_folder(root)
    assert not root.exists()


def test_removing_follows_no_link(root: Path) -> None:
    (root / "up").symlink_to("..")
    remove_folder(root)
    assert (root.parent / "secret").exists()
    (root.parent / "link").symlink_to(root.parent)
    remove_folder(root.parent / "link")
    assert (root.parent / "secret").exists()


def test_a_copy_has_regular_files_and_links_inside_only(root: Path, tmp_path: Path) -> None:
    for name, make in FOREIGN.items():
        make(root / name)
    (root / "inside").symlink_to("inner/file")
    nest(root / "inner", 3000)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "inner").symlink_to(tmp_path)  # An earlier copy is not written through.
    copy_folder(root, copy)
    assert {path.name for path in copy.iterdir()} >= {"inner", "inside", "folder", "too large"}
    assert not {"pipe", "device", "absolute link", "link upwards"} & set(os.listdir(copy))
    assert (copy / "inner/file").read_text() == "text"
    assert not (tmp_path / "file").exists()


def test_outputs_are_written_in_place_of_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("store")
    (tmp_path / "a").symlink_to("store")
    os.mkfifo(tmp_path / "b")
    (tmp_path / "c").mkdir()
    for name in "abc":
        with new_file(tmp_path / name) as file:
            file.write(b"output")
        assert Captured.of(tmp_path / name).tail == "output"
    assert (tmp_path / "store").read_text() == "store"
    os.mkfifo(tmp_path / "d")
    assert Captured.of(tmp_path / "d").tail == ""


async def test_files_for_the_next_step_replace_links_and_enter_none(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("store")
    sandbox = ProcessSandbox(tmp_path / "session").make()
    workspace = Path(sandbox.place.workspace)
    (workspace / "file").symlink_to(tmp_path / "store")
    os.mkfifo(workspace / "pipe")
    (workspace / "folder").symlink_to(tmp_path)
    await sandbox.write({workspace / "file": "new", workspace / "pipe": "new"})
    assert (workspace / "file").read_text() == (workspace / "pipe").read_text() == "new"
    assert (tmp_path / "store").read_text() == "store"
    with pytest.raises((LaunchRefused, SandboxLost), match="leads elsewhere"):
        await sandbox.write({workspace / "folder/store": "new"})
