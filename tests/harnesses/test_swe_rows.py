"""Rows of SWE-bench and its kin become Harbor folders whose tests tell right from wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridle.harnesses.tasks.harbor.grade import PARSERS, rewards
from bridle.harnesses.tasks.harbor.loader import harbor_tasks
from bridle.harnesses.tasks.harbor.swe import convert, rows_in
from bridle.harnesses.tasks.task import TaskError

FIX = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TESTS = """diff --git a/test_calc.py b/test_calc.py
--- a/test_calc.py
+++ b/test_calc.py
@@ -2,3 +2,6 @@
{blank}
 def test_zero():
     assert add(0, 0) == 0
+
+def test_two():
+    assert add(1, 1) == 2
""".replace("{blank}", " ")
COMMON = {
    "repo": "someone/calc",
    "instance_id": "someone__calc-1",
    "base_commit": "HEAD",
    "problem_statement": "add() subtracts.",
    "patch": FIX,
    "test_patch": TESTS,
    "FAIL_TO_PASS": json.dumps(["test_calc.py::test_two"]),
    "PASS_TO_PASS": ["test_calc.py::test_zero"],
}
RUN = f"{sys.executable} -m pytest -rA -p no:cacheprovider test_calc.py"
ROWS: dict[str, dict[str, Any]] = {
    "swebench": {
        **COMMON,
        "image": "org/image:1",
        "eval_script": RUN,
        "log_parser": "parse_log_pytest",
    },
    "swe-gym": COMMON,
    "swe-rebench": {
        **COMMON,
        "docker_image": "org/rebench:1",
        "install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"},
    },
    "swe-smith": {
        "instance_id": "someone__calc.1234.combine__1",
        "repo": "swesmith/someone__calc.1234",
        "image_name": "jyangballin/swesmith.x86_64.calc",
        "problem_statement": "add() subtracts.",
        "patch": FIX,
        "FAIL_TO_PASS": ["test_calc.py::test_two"],
        "PASS_TO_PASS": ["test_calc.py::test_zero"],
    },
    "r2e": {
        "repo_name": "calc",
        "commit_hash": "0123456789abcdef",
        "docker_image": "namanjain12/calc_final:0123",
        "problem_statement": "add() subtracts.",
        "expected_output_json": json.dumps({"test_two": "PASSED", "test_other": "FAILED"}),
    },
}
IMAGES = {
    "swebench": "org/image:1",
    "swe-gym": "xingyaoww/sweb.eval.x86_64.someone_s_calc-1:latest",
    "swe-rebench": "org/rebench:1",
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_of_each_kind_becomes_a_folder_that_loads(kind: str, tmp_path: Path) -> None:
    (folder,) = convert(kind, [ROWS[kind]], tmp_path)

    (task,) = harbor_tasks(str(tmp_path))
    assert task.prompt.strip() == "add() subtracts."
    assert task.container is not None
    assert (task.container.workdir, task.container.network) == ("/testbed", "session")
    assert task.container.image == IMAGES.get(kind)
    built = folder / "environment/Dockerfile"
    assert built.exists() is (kind not in IMAGES)


@pytest.mark.skipif("BRIDLE_HARBOR" not in os.environ, reason="BRIDLE_HARBOR names no harbor")
@pytest.mark.parametrize("kind", ROWS)
def test_harbors_own_validation_accepts_the_folder(kind: str, tmp_path: Path) -> None:
    (folder,) = convert(kind, [ROWS[kind]], tmp_path)
    python = Path(os.environ["BRIDLE_HARBOR"]).with_name("python")
    script = "import sys; from harbor.models.task.task import Task; Task(sys.argv[1]); "
    script += "assert Task.is_valid_dir(sys.argv[1])"

    subprocess.run([python, "-c", script, str(folder)], check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[], Path]:
    """A repository with the bug, committed."""

    def make() -> Path:
        folder = tmp_path / "testbed"
        folder.mkdir()
        (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        (folder / "test_calc.py").write_text(
            "from calc import add\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
        )
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "first"]):
            subprocess.run(["git", *command], cwd=folder, check=True)
        return folder

    return make


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ("bash {solve}", {"fail_to_pass": 1.0, "pass_to_pass": 1.0, "reward": 1.0}),
        ("true", {"fail_to_pass": 0.0, "pass_to_pass": 1.0, "reward": 0.0}),
        # The agent's own edits of the tests do not survive.
        (
            "printf 'def test_two(): pass\\n' > test_calc.py",
            {"fail_to_pass": 0.0, "pass_to_pass": 1.0, "reward": 0.0},
        ),
        ("rm calc.py", {"fail_to_pass": 0.0, "pass_to_pass": 0.0, "reward": 0.0}),
    ],
)
@pytest.mark.loop
def test_the_written_tests_accept_the_patch_and_nothing_less(
    tmp_path: Path, repository: Callable[[], Path], work: str, expected: dict[str, float]
) -> None:
    testbed = repository()
    (folder,) = convert("swebench", [ROWS["swebench"]], tmp_path / "tasks")
    logs = tmp_path / "logs"
    logs.mkdir()
    environment = {**os.environ, "TESTBED": str(testbed), "LOGS": str(logs), "HOME": str(tmp_path)}
    command = work.format(solve=folder / "solution/solve.sh")

    subprocess.run(["bash", "-c", command], cwd=testbed, env=environment, check=True)
    subprocess.run(["bash", str(folder / "tests/test.sh")], env=environment, check=True)

    assert json.loads((logs / "reward.json").read_text()) == expected


def test_the_solution_of_a_planted_bug_takes_it_out_again(tmp_path: Path) -> None:
    (folder,) = convert("swe-smith", [ROWS["swe-smith"]], tmp_path)

    assert "git apply -R " in (folder / "solution/solve.sh").read_text()
    assert "rm -rf .git" in (folder / "environment/Dockerfile").read_text()


def test_tests_in_the_image_are_hidden_from_the_agent(tmp_path: Path) -> None:
    (folder,) = convert("r2e", [ROWS["r2e"]], tmp_path)

    assert "rm -rf /r2e_tests" in (folder / "environment/Dockerfile").read_text()
    assert "rm -rf" not in (folder / "tests/Dockerfile").read_text()
    assert json.loads((folder / "tests/expected.json").read_text())["FAIL_TO_PASS"] == ["test_two"]


@pytest.mark.parametrize(
    ("parser", "log", "results"),
    [
        (
            "pytest",
            "PASSED a.py::one\nFAILED a.py::two - assert 1 == 2\nb.py::three PASSED [ 50%]\n",
            {"a.py::one": "PASSED", "a.py::two": "FAILED", "b.py::three": "PASSED"},
        ),
        (
            "unittest",
            "test_one (x.Case) ... ok\ntest_two (x.Case) ... FAIL\n",
            {"test_one (x.Case)": "PASSED", "test_two (x.Case)": "FAILED"},
        ),
        ("sympy", "test_one ok\ntest_two F\n", {"test_one": "PASSED", "test_two": "FAILED"}),
        (
            "junit",
            "<testsuite><testcase classname='x' name='one'/><testcase classname='x' name='two'>"
            "<failure/></testcase></testsuite>",
            {"x::one": "PASSED", "x::two": "FAILED"},
        ),
    ],
)
def test_the_output_of_test_runners_is_read(parser: str, log: str, results: dict[str, str]) -> None:
    assert PARSERS[parser](log) == results


def test_every_listed_test_must_pass() -> None:
    expected = {"FAIL_TO_PASS": ["a", "b"], "PASS_TO_PASS": []}

    assert rewards({"a": "PASSED", "b": "PASSED"}, expected)["reward"] == 1.0
    assert rewards({"a": "PASSED", "b": "SKIPPED"}, expected)["reward"] == 0.0
    assert rewards({"a": "PASSED"}, expected)["fail_to_pass"] == 0.5


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("swebench", {"test_patch": None}, "row 1: it has no test_patch"),
        ("swebench", {"FAIL_TO_PASS": None}, "row 1: FAIL_TO_PASS is not a list"),
        ("swebench", {"log_parser": "parse_log_cargo"}, "parse_log_cargo"),
        ("swe-smith", {"image_name": None}, "row 1: it has no image_name"),
    ],
)
def test_a_row_that_lacks_something_is_named(
    tmp_path: Path, kind: str, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(TaskError, match=why):
        list(convert(kind, [{**ROWS[kind], **change}], tmp_path))


def test_rows_are_read_from_lines_json_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"a": 1}, {"a": 2}]
    (tmp_path / "r.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "r.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")

    assert all(list(rows_in(tmp_path / f"r.{end}")) == rows for end in ("jsonl", "json", "parquet"))
    with pytest.raises(TaskError, match=r"none\.jsonl"):
        list(rows_in(tmp_path / "none.jsonl"))
