"""Print ``docs/llms.txt`` (https://llmstxt.org): the pages of the navigation, for language models.

``python docs/site/llms.py > docs/llms.txt`` writes it. Pages that are made from the code are left
out, because a checkout does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
_ELSEWHERE = {
    "index.md": "../README.md",
    "changelog.md": "../CHANGELOG.md",
    "contributing.md": "../CONTRIBUTING.md",
}


def llms_txt() -> str:
    """Return the list, with a heading for each section of the navigation."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = {"Start": []}
    for entry in config["nav"]:
        ((title, value),) = entry.items()
        nested = isinstance(value, list)
        sections.setdefault(title if nested else "Start", []).extend(
            _lines(value if nested else [entry])
        )
    parts = [f"# {config['site_name']}\n\n> {config['site_description']}\n"]
    parts += [
        f"## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines
    ]
    return "\n".join(parts)


def _lines(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        ((title, value),) = entry.items()
        if isinstance(value, list):
            yield from _lines(value)
            continue
        path = _ELSEWHERE.get(value, value)
        if not (page := ROOT / "docs" / path).exists():
            continue
        heading = page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        yield f"- [{title}]({path})" + (f": {heading}" if heading.lower() != title.lower() else "")


if __name__ == "__main__":
    print(llms_txt(), end="")
