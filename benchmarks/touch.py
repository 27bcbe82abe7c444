"""The number of files that a change of a kind touches: ``python benchmarks/touch.py``.

Each case makes a real change in a copy of this checkout and proves it there by a program. It then
counts the files that differ. A case names the files that do not count: those that only use what the
change adds.

A part of another distribution needs none: each distribution of ``tests/distributions`` is installed
and run from end to end by ``tests/bridle/test_distributions.py``, and no product file names it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

_CHECKOUT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of change."""

    name: str
    limit: int
    """Maximum number of files."""
    change: Callable[[Path], None]
    """The change, in the folder of a checkout."""
    proof: str
    """A program that fails unless the change works. It runs in an empty folder, after
    ``before``."""
    before: str = ""
    """A program that runs in that folder with the checkout as it was."""
    users: frozenset[str] = frozenset()
    """The files that use what the change adds."""


@dataclass(frozen=True, slots=True)
class Touched:
    """The files that a change of one kind touched."""

    name: str
    limit: int
    files: tuple[str, ...]
    users: tuple[str, ...]

    @property
    def within(self) -> bool:
        return len(self.files) <= self.limit


def measure(case: Case, checkout: Path = _CHECKOUT) -> Touched:
    """Make the change in a copy of ``checkout``, prove it, and return the files that it touched.

    Raise ``subprocess.CalledProcessError`` if a program of the case fails.
    """
    with tempfile.TemporaryDirectory(prefix="bridle-touch-") as folder:
        copy, scratch = Path(folder, "checkout"), Path(folder, "scratch")
        scratch.mkdir()
        _copy(checkout, copy)
        before = _contents(copy)
        if case.before:
            run(copy, scratch, "-c", case.before)
        case.change(copy)
        run(copy, scratch, "-c", case.proof)
        after = _contents(copy)
    touched = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    return Touched(
        case.name,
        case.limit,
        tuple(name for name in touched if name not in case.users),
        tuple(name for name in touched if name in case.users),
    )


def run(checkout: Path, folder: Path, *arguments: str, **variables: str) -> None:
    """Run Python in ``folder`` with the packages of ``checkout``.

    Raise ``subprocess.CalledProcessError`` if it fails.
    """
    paths = {"PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | paths | variables,
        check=True,
        stdout=sys.stderr,
    )


def _copy(checkout: Path, target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, place = checkout / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            place.symlink_to(os.readlink(source))
        elif source.exists():
            place.write_bytes(source.read_bytes())


def _contents(checkout: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(checkout)): path.read_bytes()
        for path in checkout.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".pytest_cache" not in path.parts
    }


def _insert(file: Path, before: str, text: str) -> None:
    """Insert ``text`` before the only place of ``before``.

    Raise ``ValueError`` unless there is one.
    """
    content = file.read_text()
    if content.count(before) != 1:
        raise ValueError(f"{file.name} has {content.count(before)} times {before!r}")
    file.write_text(content.replace(before, text + before))


_PAGE_TEST: Final = "tests/store/test_sql_page.py"
_MIGRATION: Final = '''"""Calls record how long they waited for the engine."""

import sqlalchemy as sa
from alembic import op

revision = "9000"
down_revision = "{last}"


def upgrade() -> None:
    with op.batch_alter_table("calls") as calls:
        calls.add_column(sa.Column("waited_s", sa.Float(53)))
'''


def _add_column(checkout: Path) -> None:
    _insert(
        checkout / "store/call.py",
        '    kind: Annotated[CallKind, Fact("The purpose of the call"',
        '    waited_s: Annotated[float | None, Fact("Seconds until the engine took it")] = None\n',
    )
    _insert(checkout / "proxy/calls/call.py", "            status=status,\n            notes=",
            "            waited_s=1.5,\n")  # fmt: skip
    versions = checkout / "store/schema/migrations/versions"
    last = max(path.name.split("_")[0] for path in versions.glob("[0-9]*.py"))
    (versions / "9000_waited.py").write_text(_MIGRATION.format(last=last))
    page = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "declared_columns", _PAGE_TEST)
    run(checkout, checkout, *page, BRIDLE_WRITE_DOCS="1")


_OLD_STORE: Final = """
from bridle.store.schema.database import migrate
migrate("s.db")
"""
_COLUMN_PROOF: Final = """
import sqlite3
from pathlib import Path
import httpx
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.reading.queries import Reader

train_tokenizer(Path("model"), ["hello there"] * 20)
with ScriptedEngine(Path("model"), lambda _: ScriptedReply("hello")) as engine:
    with ProxyServer(ProxySettings(engine.base_url, "s.db", tokenizer_dir=Path("model"))) as proxy:
        with httpx.Client(base_url=proxy.base_url, timeout=60, trust_env=False) as http:
            made = http.post("/bridle/v1/sessions", json={"name": "a"}).json()
            asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
            http.post("/s/a/v1/chat/completions", json=asked).raise_for_status()
            (shown,) = http.get(f"/bridle/v1/sessions/{made['id']}/calls").json()
with Reader("s.db") as reader:
    (call,) = reader.calls(made["id"])
(row,) = sqlite3.connect("s.db").execute("SELECT waited_s FROM turns")
assert (call.waited_s, row[0], shown["waited_s"]) == (1.5, 1.5, 1.5), (call, row, shown)
"""

CASES: Final = (
    Case(
        "column of calls",
        limit=3,
        change=_add_column,
        before=_OLD_STORE,
        proof=_COLUMN_PROOF,
        users=frozenset({"proxy/calls/call.py"}),
    ),
)


ROOMS: Final = ("src", "store", "engine", "proxy", "reconstruct", "trainer", "harnesses")
DISTRIBUTIONS: Final = {
    "dialect": "bridle-cohere",
    "export": "bridle-markdown",
    "adapter": "bridle-parrot",
    "sandbox": "bridle-remote",
}
"""The distribution that stands for each kind of part."""


def touched() -> dict[str, list[str]]:
    """Return the product files that each change needs, by the name of the change."""
    return {kind: naming(name) for kind, name in DISTRIBUTIONS.items()}


def naming(distribution: str) -> list[str]:
    """Return the product files that contain a name of a distribution.

    The name is its own, that of a module of it, or that of a part that it brings, in quotation
    marks.
    """
    file = _CHECKOUT / "tests" / "distributions" / distribution / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    groups: Mapping[str, Mapping[str, str]] = project["entry-points"]
    words = {distribution}
    for parts in groups.values():
        for name, place in parts.items():
            words |= {f'"{name}"', place.partition(":")[0]}
    patterns = [argument for word in sorted(words) for argument in ("-e", word)]
    found = subprocess.run(
        ["git", "grep", "-lF", *patterns, "--", *ROOMS],
        cwd=_CHECKOUT,
        capture_output=True,
        text=True,
    )
    return found.stdout.split()


def parts() -> list[Touched]:
    """Return the files that a part of another distribution needed, for each kind of part."""
    return [Touched(kind, 0, tuple(files), ()) for kind, files in touched().items()]


def main() -> None:
    """Print the files of each case as JSON. Exit with 1 if a case touches more than its limit."""
    found = [*map(measure, CASES), *parts()]
    print(json.dumps([asdict(one) for one in found], indent=2))
    sys.exit(0 if all(one.within for one in found) else 1)


if __name__ == "__main__":
    main()
