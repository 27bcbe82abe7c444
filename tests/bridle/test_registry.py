"""The idiom of open sets: built-in names, entry points of distributions, and references."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bridle.registry import Registry, UnknownPart
from bridle.user_code import UserCodeError


@pytest.fixture
def parts() -> Registry[object]:
    return Registry("number", "bridle.tests.numbers", {"pi": "math:pi", "gone": "math:gone"})


def install(folder: Path, distribution: str, **entry_points: str) -> None:
    """Make a distribution whose entry points of numbers are given as ``MODULE:NAME``."""
    about = folder / f"{distribution}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[bridle.tests.numbers]", *lines]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_built_in_part_is_imported_when_it_is_asked_for(site: Path) -> None:
    (site / "lazy_part_of_a_test.py").write_text("value = 7\n")
    parts: Registry[int] = Registry("number", "bridle.x", {"seven": "lazy_part_of_a_test:value"})
    assert parts.names() == ["seven"]
    assert "lazy_part_of_a_test" not in sys.modules
    assert parts.get("seven") == 7


def test_an_entry_point_of_a_distribution_is_a_part(parts, site: Path) -> None:
    parts.register("two", 2)
    install(site, "more-numbers", tau="math:tau", e="math:e")
    assert parts.names() == ["pi", "gone", "two", "e", "tau"]
    assert 6.28 < parts.get("tau") < 6.29


def test_a_reference_to_a_file_or_a_module_is_a_part(parts, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("three = 3\n")
    assert parts.get(f"{tmp_path}/mine.py:three") == 3
    assert parts.get("math:inf") == float("inf")
    with pytest.raises(UserCodeError, match="has no 'four'"):
        parts.get(f"{tmp_path}/mine.py:four")


def test_a_name_that_nothing_has_is_refused_with_the_names_and_forms(parts, site: Path) -> None:
    install(site, "more-numbers", tau="math:tau")
    with pytest.raises(
        UnknownPart,
        match=r"no number 'two': name FILE\.py:NAME or one of pi, gone, tau .*bridle\.tests\.numb",
    ):
        parts.get("two")


def test_a_name_that_several_distributions_have_is_refused(parts, site: Path) -> None:
    install(site, "some-numbers", tau="math:tau")
    install(site, "more-numbers", tau="cmath:tau")
    with pytest.raises(UnknownPart, match="'tau', more-numbers and some-numbers: uninstall"):
        parts.get("tau")


def test_a_part_that_cannot_be_loaded_is_refused_with_its_distribution(parts, site: Path) -> None:
    install(site, "broken", tau="no_such_module:tau", e="math:no_such_name")
    with pytest.raises(UserCodeError, match=r"'tau' \(no_such_module:tau\) of broken: ModuleNot"):
        parts.get("tau")
    with pytest.raises(UserCodeError, match="of broken: AttributeError"):
        parts.get("e")
    with pytest.raises(UserCodeError, match="math has no 'gone'"):
        parts.get("gone")


def test_a_name_is_registered_once(parts) -> None:
    assert parts.registered("two")(2) == parts.register("two", 2) == parts.get("two")
    for name in ("two", "pi"):
        with pytest.raises(UnknownPart, match=f"there is a number '{name}' already"):
            parts.register(name, 4)
    for name in ("", "a:b"):
        with pytest.raises(UnknownPart, match="no colon"):
            parts.register(name, 4)
