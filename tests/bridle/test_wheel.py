"""Test the wheel: one package with the product's own files, the same from checkout and sdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[2]
ROOMS = (
    "cli",
    "diagnosis",
    "engine",
    "harnesses",
    "proxy",
    "recipes",
    "reconstruct",
    "run",
    "store",
    "trainer",
)
ELSEWHERE = ("bench", "learning", "tests", "node_modules", ".venv")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def build_wheel(source: Path, target: Path) -> Path:
    pip("wheel", "--no-deps", "--wheel-dir", str(target), str(source))
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_one_name_is_installed_with_all_rooms_and_nothing_else(wheel: Path) -> None:
    found = names(wheel)
    tops = {name.split("/")[0] for name in found}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"bridle"}
    for room in ROOMS:
        tracked = subprocess.check_output(
            ["git", "ls-files", "--", room if (ROOT / room).is_dir() else f"src/bridle/{room}"],
            cwd=ROOT,
            text=True,
        )
        files = {f"bridle/{name.removeprefix('src/bridle/')}" for name in tracked.split()}
        files -= {name for name in files if set(ELSEWHERE) & set(name.split("/"))}
        assert files
        assert files - found == set()
    ours = {name for name in found if not name.startswith("bridle/_examples/")}
    assert not {name for name in ours if set(ELSEWHERE) & set(name.split("/"))}


def test_the_sdist_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--target", str(tmp_path / "tools"), "hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path / "sdist")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "tools")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() for member in archive.getmembers())
    assert names(build_wheel(sdist, tmp_path / "wheel")) == names(wheel)


def test_the_installed_program_starts_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    program = tmp_path / "venv" / "bin" / "bridle"
    own = tmp_path / "venv" / "bin" / "python"
    subprocess.run([own, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(libraries)}
    for command in ([], ["proxy"], ["rollout"]):
        told = subprocess.check_output(
            [program, *command, "--help"], cwd=tmp_path, env=environment, text=True
        )
        assert "Usage: bridle" in told
        assert "bench" not in told
    where = "import bridle; print(bridle.__file__)"
    told = subprocess.check_output([own, "-P", "-c", where], env=environment, text=True)
    assert told.startswith(str(tmp_path))
