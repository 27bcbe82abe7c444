"""The order of rooms in docs/architecture.md is the one that the import contracts hold."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def order(container: str) -> list[set[str]]:
    """Return the layers of the contract for ``container``, the highest first."""
    contracts: list[dict[str, Any]] = CONTRACTS["contracts"]
    (found,) = (each for each in contracts if each.get("containers") == [container])
    return [set(layer.split(" | ")) for layer in found["layers"]]


def test_the_page_names_the_proxys_rooms_in_the_order_of_their_contract() -> None:
    named = PAGE.split("Inside `proxy`, from the top: ")[1].split(". ")[0]
    assert [set(re.findall(r"`(\w+)`", each)) for each in named.split(";")] == order("bridle.proxy")


def test_the_page_names_all_rooms_from_the_top_down() -> None:
    rows = re.findall(r"^\| `(?:src/bridle/)?(\w+)/?` \|", PAGE, re.MULTILINE)
    layers = order("bridle")
    place = {room: at for at, layer in enumerate(layers) for room in layer}
    places = [place[room] for room in rows]
    assert places == sorted(places)
    folders = {each.name for each in (ROOT / "src/bridle").iterdir() if each.is_dir()}
    assert set(rows) == folders & set(place)
