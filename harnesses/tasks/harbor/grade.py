"""The grader of a test run: it is copied into a task's ``tests`` folder and run by its ``test.sh``.

The arguments are ``grade.py LOG EXPECTED.json REWARD.json``. ``LOG`` is the output of the tests, or
a JUnit file. ``EXPECTED`` has ``parser`` and the tests that must pass, ``FAIL_TO_PASS`` and
``PASS_TO_PASS``. The reward is 1 if all of them pass. The script uses only the standard library of
Python 3.6 and later.
"""

import json
import re
import sys
import xml.etree.ElementTree

STATES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
PASSING = ("PASSED", "XFAIL")


def pytest_results(log: str) -> "dict[str, str]":
    """Return pytest's states by test.

    They come from ``STATE name`` in the summary (-rA) and ``name STATE`` in verbose output.
    """
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", log).split("\n"):
        after = re.match(rf"({STATES}) (\S.*?)(?: - .*)?$", line.strip())
        before = re.match(rf"(\S.*?) ({STATES})(?:\s+(?:\[.*|\(.*))?$", line.strip())
        if after:
            found[after.group(2)] = after.group(1)
        elif before and "::" in before.group(1):
            found.setdefault(before.group(1), before.group(2))
    return found


def unittest_results(log: str) -> "dict[str, str]":
    """Return the states by test of verbose unittest and Django.

    They come from ``name (module.Class) ... ok``.
    """
    found = {}
    for line in log.split("\n"):
        match = re.match(r"(.+?) \.\.\. (ok|FAIL|ERROR|skipped.*|expected failure)$", line.strip())
        if match:
            states = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}
            state = "XFAIL" if match.group(2) == "expected failure" else "SKIPPED"
            found[match.group(1)] = states.get(match.group(2), state)
    return found


def sympy_results(log: str) -> "dict[str, str]":
    """Return the states by test of sympy's own runner, from ``name ok``."""
    found = {}
    for line in log.split("\n"):
        match = re.match(r"(test_\w+) (ok|E|F|f|s)\b", line.strip())
        if match:
            states = {"ok": "PASSED", "E": "ERROR", "F": "FAILED", "f": "XFAIL", "s": "SKIPPED"}
            found[match.group(1)] = states[match.group(2)]
    return found


def junit_results(log: str) -> "dict[str, str]":
    """Return the states by test of a JUnit file, with ``classname::name`` as the test's name."""
    found = {}
    # The file is the task's own tests', and is read in their container.
    for case in xml.etree.ElementTree.fromstring(log).iter("testcase"):  # noqa: S314
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        state = {"failure": "FAILED", "error": "ERROR", "skipped": "SKIPPED"}
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        found[name] = state[bad[0]] if bad else "PASSED"
    return found


PARSERS = {
    "pytest": pytest_results,
    "unittest": unittest_results,
    "sympy": sympy_results,
    "junit": junit_results,
}


def rewards(results: "dict[str, str]", expected: "dict[str, list[str]]") -> "dict[str, float]":
    """Return the reward, and the share of each list that passes."""
    shares: dict[str, float] = {}
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        tests = expected[name]
        passing = sum(results.get(test) in PASSING for test in tests)
        shares[name.lower()] = float(passing) / len(tests) if tests else 1.0
    shares["reward"] = float(all(share == 1.0 for share in shares.values()))
    return shares


def main() -> None:
    log, expected, target = sys.argv[1:]
    with open(expected) as file:
        wanted = json.load(file)
    with open(log, errors="replace") as file:
        results = PARSERS[wanted["parser"]](file.read())
    with open(target, "w") as file:
        json.dump(rewards(results, wanted), file)


if __name__ == "__main__":
    main()
