"""The idiom of open sets: built-in names, entry points of distributions, and references."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from bridle.registry import Registry, UnknownOption, UnknownPart, options_of, require_parts
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


@dataclass(frozen=True)
class Slope:
    rise: Annotated[float, Meta(ge=0)] = 1.0


_GENTLE = Slope()


def line(at: float, options: Slope = _GENTLE) -> float:
    return options.rise * at


def test_a_part_receives_its_own_options() -> None:
    parts: Registry[Callable[[float], float]] = Registry("curve", "bridle.tests.curves")
    parts.register("line", line)
    assert options_of(parts.get("line")) is Slope
    assert parts.configured("line", {})(2) == 2
    stated = {"line": {"rise": 3}, "another": {"depth": 1}}
    assert parts.configured("line", stated)(2) == 6
    assert parts.configured(f"{__file__}:line", stated)(2) == 6


def test_a_part_that_is_a_dataclass_is_made_with_its_options() -> None:
    parts: Registry[Callable[[], Slope]] = Registry("slope", "bridle.tests.slopes")
    parts.register("steep", Slope)
    assert options_of(Slope) is Slope
    assert parts.configured("steep", {"steep": {"rise": 9}})() == Slope(9)
    assert parts.configured("steep", {})() == Slope()


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("line", {"fall": 1}, "the curve 'line' has no option 'fall', but rise"),
        ("line", {"rise": -1}, "options of the curve 'line': Expected `float` >= 0"),
        ("plain", {"rise": 1}, "the curve 'plain' has no option 'rise', and none at all"),
        ("class", {"rise": 1}, "the curve 'class' has no option 'rise', and none at all"),
    ],
)
def test_an_option_that_a_part_cannot_have_is_refused(name, options, problem) -> None:
    parts: Registry[object] = Registry("curve", "bridle.tests.curves")
    parts.register("line", line)
    parts.register("plain", abs)
    parts.register("class", str)
    with pytest.raises(UnknownOption, match=problem):
        parts.configured(name, {name: options})


def test_options_of_a_part_that_does_not_exist_are_refused() -> None:
    parts: Registry[Callable[[float], float]] = Registry("curve", "bridle.tests.curves")
    parts.register("line", line)
    parts.register("plain", abs)
    other: Registry[object] = Registry("number", "bridle.tests.numbers", {"pi": "math:pi"})
    require_parts({"line": {"rise": 2}}, (parts, "plain"), (other, "pi"))
    require_parts({"line": {"rise": 2}}, (parts, f"{__file__}:line"))
    with pytest.raises(UnknownPart, match="options are for 'lines', which is none of plain, pi, l"):
        require_parts({"lines": {"rise": 2}}, (parts, "plain"), (other, "pi"))
    with pytest.raises(UnknownOption, match="no option 'fall'"):
        require_parts({"line": {"fall": 2}}, (parts, "line"))
    with pytest.raises(UnknownPart, match="no number 'tau'"):
        require_parts({}, (parts, "line"), (other, "tau"))
