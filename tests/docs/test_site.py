"""The site builds without a warning, no link of it leads nowhere, and its commands are real."""

from __future__ import annotations

import html
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from bridle.cli import program
from bridle.cli.settings import shown_settings

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src/bridle/cli/skill").rglob("*.md"),
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    ]
)
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_SHELLS = ("", "console", "sh", "bash")


class Links(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if (anchor := given.get("id")) is not None:
            self.anchors.add(anchor)
        for name in ("href", "src"):
            if (target := given.get(name)) is not None:
                self.targets.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    built = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    return target


def test_no_link_of_the_site_leads_nowhere(site: Path) -> None:
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 20
    broken = []
    for path, links in pages.items():
        if path.name == "404.html":  # its links begin at the site's address
            continue
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            found = (path.parent / unquote(url.path)).resolve() if url.path else path
            found = found / "index.html" if found.is_dir() else found
            if not found.exists():
                broken.append((path.relative_to(site), target))
            elif url.fragment and found in pages:
                anchors = pages[found].anchors
                if unquote(url.fragment) not in anchors and not url.fragment.startswith("__"):
                    broken.append((path.relative_to(site), target))
    assert not broken


def test_links_to_the_repository_lead_to_files_that_are_there(site: Path) -> None:
    prefix = "https://github.com/bridle-rl/bridle/blob/main/"
    named = {
        target.removeprefix(prefix).partition("#")[0]
        for path in site.rglob("*.html")
        for target in Links(path.read_text(encoding="utf-8")).targets
        if target.startswith(prefix)
    }
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def test_llms_txt_lists_the_pages_of_the_navigation() -> None:
    written = (ROOT / "docs/llms.txt").read_text(encoding="utf-8")
    argv = [sys.executable, str(ROOT / "docs/site/llms.py")]
    made = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert written == made, "run: python docs/site/llms.py > docs/llms.txt"
    title, blank, summary, *_ = made.splitlines()
    assert (title, blank, summary[:2]) == ("# Bridle", "", "> ")
    named = re.findall(r"^- \[[^]]+\]\(([^)]+)\)(?:: .+)?$", made, re.MULTILINE)
    assert named
    assert not [path for path in named if not (ROOT / "docs" / path).exists()]


def test_the_reference_has_every_command(site: Path) -> None:
    page = (site / "reference/commands/index.html").read_text(encoding="utf-8")
    for name in program.COMMANDS:
        assert f'id="bridle-{name}"' in page
    assert "--external" in page


def test_the_python_page_has_fields_methods_and_readable_signatures(site: Path) -> None:
    page = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert " at 0x" not in text
    assert "*args" not in text
    assert "async create_session(self, request: SessionRequest) -> Session" in text
    assert "kind: RewardKind = RewardKind.SCORE" in text
    assert "payload" in text, "a field of Task"


def test_the_settings_are_those_that_a_run_starts_with(site: Path) -> None:
    page = " ".join((site / "reference/settings/index.html").read_text(encoding="utf-8").split())
    row = page.partition("<code>learning_rate</code>")[2].partition("</tr>")[0]
    assert '<code>"auto"</code>' in row
    assert "<code>seal_idle_s</code>" in page


def typed(page: Path) -> list[list[str]]:
    """The ``bridle`` commands in a page's blocks, each as its words."""
    found = []
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    for block in (text for language, text in blocks if language in _SHELLS):
        for line in block.replace("\\\n", " ").splitlines():
            at = re.match(r"(?:[A-Z_]+=\S+ )*bridle (.*)", line.strip().removeprefix("$ "))
            if at is not None:
                words = shlex.split(at[1].rstrip("& "), comments=True)
                found.append([word for word in words if word != "…"])
    return [words for words in found if words]


def test_commands_are_found_on_the_pages() -> None:
    assert sum(len(typed(page)) for page in PAGES) >= 55


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_is_one_with_options_that_it_has(page: Path) -> None:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site/pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    for words in typed(page):
        if words[0].startswith("-"):
            continue
        assert words[0] in program.COMMANDS, words
        command, rest = pages.command_of(words)
        options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        options |= {"--help", "-h"}
        settings = shown_settings(command)
        for before, word in itertools.pairwise(rest):
            if before == "--set" and not word.startswith(("policies.", "routes.")):
                assert word.partition("=")[0] in settings, words
        for word in rest:
            if word in ("--", "|", ">", "&&", ";"):
                break
            if word.startswith("--"):
                assert word.partition("=")[0] in options, words
