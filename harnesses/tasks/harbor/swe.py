"""A converter from rows of SWE-bench and similar datasets to Harbor folders.

Sources: the data cards and harnesses of SWE-bench (and its version 5), SWE-smith, SWE-Gym,
SWE-rebench and R2E-Gym. A row names an image with the repository in ``/testbed``, the tests that
must pass, and the patch that makes them pass.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bridle.harnesses.tasks.task import TaskError

Row = Mapping[str, Any]
GRADE: Final = Path(__file__).with_name("grade.py")
_CONDA: Final = ". /opt/miniconda3/bin/activate && conda activate testbed"
_PYTEST: Final = "pytest -rA --color=no --tb=no -p no:cacheprovider"
_RUNNERS: Final = {
    "django/django": (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
        "unittest",
    ),
    "sympy/sympy": ("bin/test -C --verbose", "sympy"),
}
"""The command that runs a repository's tests, and the parser of its output, for repositories that
do not use pytest."""
_PARSERS: Final = (
    ("django", "unittest"),
    ("unittest", "unittest"),
    ("sympy", "sympy"),
    ("junit", "junit"),
    ("pytest", "pytest"),
)


@dataclass(frozen=True, slots=True)
class SweTask:
    """A row in the form of a Harbor folder."""

    id: str
    statement: str
    image: str
    command: str
    """The command that runs the tests in ``/testbed`` and prints the output for the parser."""
    parser: str
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    solution: str
    """The patch that solves the task."""
    reverse_solution: bool = False
    """True if the patch must be undone instead of applied."""
    test_patch: str = ""
    base_commit: str = ""
    breaking_patch: str = ""
    """A patch that is applied to the image before the agent sees it; the repository's history is
    removed."""
    hidden: tuple[str, ...] = field(default=())
    """Paths of the image that only the task's tests see."""


def swebench(row: Row) -> SweTask:
    """Convert a row of SWE-bench.

    The row is of version 5 with ``image`` and ``eval_script``, or older.
    """
    name = _text(row, "instance_id")
    image = row.get("image") or _registry("swebench", name, "_1776_")
    return _with_test_patch(row, name, str(image))


def swe_gym(row: Row) -> SweTask:
    """Convert a row of SWE-Gym, which is like one of SWE-bench with another image."""
    name = _text(row, "instance_id")
    return _with_test_patch(row, name, _registry("xingyaoww", name, "_s_"))


def swe_rebench(row: Row) -> SweTask:
    """Convert a row of SWE-rebench.

    Its ``install_config`` has the test command and the log parser.
    """
    name = _text(row, "instance_id")
    config = row.get("install_config") or {}
    config = json.loads(config) if isinstance(config, str) else config
    image = row.get("docker_image") or row.get("image_name")
    image = image or _registry("swerebench", name, "_1776_")
    return _with_test_patch(row, name, str(image), config.get("test_cmd"), config.get("log_parser"))


def swe_smith(row: Row) -> SweTask:
    """Convert a row of SWE-smith, whose ``patch`` adds the bug; the solution undoes it."""
    patch = _text(row, "patch")
    return SweTask(
        id=_text(row, "instance_id"),
        statement=_text(row, "problem_statement"),
        image=_text(row, "image_name"),
        command=f"{_CONDA}\n{_PYTEST} --verbose",
        parser="pytest",
        fail_to_pass=_tests(row, "FAIL_TO_PASS"),
        pass_to_pass=_tests(row, "PASS_TO_PASS"),
        solution=patch,
        reverse_solution=True,
        breaking_patch=patch,
    )


def r2e(row: Row) -> SweTask:
    """Convert a row of R2E-Gym, whose image contains the tests, which the agent must not see."""
    expected = row.get("expected_output_json") or "{}"
    expected = json.loads(expected) if isinstance(expected, str) else expected
    passing = [name for name, state in expected.items() if state == "PASSED"]
    commit = _text(row, "commit_hash")
    return SweTask(
        id=f"{row.get('repo_name') or row.get('repo')}-{commit[:12]}",
        statement=_text(row, "problem_statement"),
        image=_text(row, "docker_image"),
        command="ln -sfn /r2e_tests r2e_tests\nbash run_tests.sh",
        parser="pytest",
        fail_to_pass=passing,
        pass_to_pass=[],
        solution=str(row.get("patch") or ""),
        hidden=("/r2e_tests", "/testbed/run_tests.sh", "/testbed/r2e_tests"),
    )


KINDS: Final[Mapping[str, Callable[[Row], SweTask]]] = {
    "swebench": swebench,
    "swe-smith": swe_smith,
    "swe-gym": swe_gym,
    "swe-rebench": swe_rebench,
    "r2e": r2e,
}


def rows_in(file: Path) -> Iterator[Row]:
    """Yield the rows of a ``.jsonl``, ``.json`` or ``.parquet`` file. Raise :class:`TaskError`."""
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet

            yield from parquet.read_table(file).to_pylist()
        elif file.suffix == ".json":
            yield from json.loads(file.read_text(encoding="utf-8"))
        else:
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.strip():
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise TaskError(f"{file}: {error}") from error


def convert(kind: str, rows: Iterable[Row], target: Path) -> Iterator[Path]:
    """Write a folder below ``target`` for each row, and yield it.

    Raise :class:`TaskError` for an unknown kind, and with the row's number for a row that lacks a
    field.
    """
    if kind not in KINDS:
        raise TaskError(f"{kind!r} is not one of {', '.join(KINDS)}")
    for number, row in enumerate(rows, start=1):
        try:
            yield write(KINDS[kind](row), target)
        except (TaskError, ValueError, AttributeError) as error:
            raise TaskError(f"row {number}: {error}") from error


def write(task: SweTask, target: Path) -> Path:
    """Write the Harbor folder of one task; it replaces an older one."""
    folder = target / re.sub(r"[^A-Za-z0-9._-]", "-", task.id)
    shutil.rmtree(folder, ignore_errors=True)
    separate = bool(task.hidden)
    files = {
        "task.toml": _config(task, separate),
        "instruction.md": task.statement.strip() + "\n",
        "solution/fix.patch": task.solution,
        "solution/solve.sh": _SOLVE.format(options="-R " if task.reverse_solution else ""),
        "tests/test.sh": _TEST.format(command=task.command, restore=_restore(task)),
        "tests/expected.json": json.dumps(
            {
                "parser": task.parser,
                "FAIL_TO_PASS": task.fail_to_pass,
                "PASS_TO_PASS": task.pass_to_pass,
            }
        ),
    }
    if task.test_patch:
        files["tests/tests.patch"] = task.test_patch
    if task.breaking_patch:
        files["environment/breaking.patch"] = task.breaking_patch
        files["environment/Dockerfile"] = _BROKEN.format(image=task.image)
    elif separate:
        hidden = " ".join(task.hidden)
        files["environment/Dockerfile"] = f"FROM {task.image}\nRUN rm -rf {hidden}\n"
        files["tests/Dockerfile"] = f"FROM {task.image}\nCOPY . /tests/\n"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "environment").mkdir(exist_ok=True)
    shutil.copy(GRADE, folder / "tests/grade.py")
    return folder


_SOLVE: Final = """#!/bin/bash
set -e
cd "${{TESTBED:-/testbed}}"
git apply {options}"$(dirname "$0")/fix.patch"
"""
_TEST: Final = """#!/bin/bash
tests=$(cd "$(dirname "$0")" && pwd)
logs=${{LOGS:-/logs/verifier}}
cd "${{TESTBED:-/testbed}}"
git config --global --add safe.directory "$PWD"
{restore}(
{command}
) >"$logs/tests.log" 2>&1
python3 "$tests/grade.py" "$logs/tests.log" "$tests/expected.json" "$logs/reward.json"
"""
_BROKEN: Final = """FROM {image}
COPY breaking.patch /tmp/breaking.patch
RUN cd /testbed && git apply /tmp/breaking.patch && rm -rf .git /tmp/breaking.patch \\
 && git init -q && git add -A \\
 && git -c user.name=task -c user.email=task@localhost commit -q -m "The repository"
"""


def _config(task: SweTask, separate: bool) -> str:
    lines = ['schema_version = "1.4"']
    if separate:
        lines.append('artifacts = ["/testbed"]')
    lines += ["[metadata]", f"id = {json.dumps(task.id)}", "[agent]", "timeout_sec = 3000.0"]
    lines += ["[verifier]", "timeout_sec = 1800.0"]
    lines += ['environment_mode = "separate"'] if separate else []
    lines += ["[environment]", 'network_mode = "no-network"', 'workdir = "/testbed"']
    if not separate and not task.breaking_patch:
        lines.append(f"docker_image = {json.dumps(task.image)}")
    if separate:
        lines += ["[verifier.environment]", 'network_mode = "no-network"', 'workdir = "/testbed"']
    return "\n".join(lines) + "\n"


def _restore(task: SweTask) -> str:
    """Return shell commands that restore the tests' files and apply the test patch.

    The files are those of the base commit, whatever the agent did to them.
    """
    if not task.test_patch:
        return ""
    files = " ".join(_quoted(name) for name in _files_of(task.test_patch))
    base = task.base_commit or "HEAD"
    return (
        f"for file in {files}; do\n"
        f"  git checkout -q {base} -- $file 2>/dev/null || rm -f $file\ndone\n"
        'git apply --whitespace=nowarn "$tests/tests.patch"\n'
    )


def _with_test_patch(
    row: Row, name: str, image: str, command: str | None = None, reader: str | None = None
) -> SweTask:
    repository = str(row.get("repo", ""))
    usual, parser = _RUNNERS.get(repository, (_PYTEST, "pytest"))
    patch = _text(row, "test_patch")
    script = row.get("eval_script")
    if script:
        command = str(script)
    else:
        files = " ".join(_quoted(file) for file in _files_of(patch))
        command = f"{_CONDA}\n{command or usual} {_modules(files, repository)}"
    stated = reader or row.get("log_parser")
    return SweTask(
        id=name,
        statement=_text(row, "problem_statement"),
        image=image,
        command=command,
        parser=_parser(str(stated)) if stated else parser,
        fail_to_pass=_tests(row, "FAIL_TO_PASS"),
        pass_to_pass=_tests(row, "PASS_TO_PASS"),
        solution=_text(row, "patch"),
        test_patch=patch,
        base_commit=str(row.get("base_commit") or ""),
    )


def _modules(files: str, repository: str) -> str:
    """Return the runner's arguments for test files.

    They are the modules below ``tests`` for Django, and the files for others.
    """
    if repository != "django/django":
        return files
    names = (name.removeprefix("tests/").removesuffix(".py") for name in files.split())
    return " ".join(name.replace("/", ".") for name in names)


def _files_of(patch: str) -> list[str]:
    """Return the files that a patch changes or adds."""
    return re.findall(r"^diff --git a/.+ b/(.+)$", patch, re.MULTILINE)


def _parser(stated: str) -> str:
    for part, parser in _PARSERS:
        if part in stated.lower():
            return parser
    raise TaskError(
        f"the log parser {stated!r} is not known: use one of pytest, unittest, sympy, junit"
    )


def _tests(row: Row, name: str) -> list[str]:
    """Return a list of tests, which some rows have as JSON."""
    value = row.get(name)
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, list):
        raise TaskError(f"{name} is not a list of tests")
    return [str(test) for test in found]


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise TaskError(f"it has no {name}")
    return value


def _registry(owner: str, name: str, between: str) -> str:
    return f"{owner}/sweb.eval.x86_64.{name.lower().replace('__', between)}:latest"


def _quoted(name: str) -> str:
    if not re.fullmatch(r"[\w./@+-]+", name):
        raise TaskError(f"a test's file has the name {name!r}")
    return name
