"""Debian's Chromium over the viewer's command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.trained import trained

from bridle.bench.gallery import fill
from bridle.store.reading.queries import Reader
from bridle.store.writing.writer import Writer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")


@dataclass(frozen=True)
class Served:
    """A store and the address of its pages."""

    url: str
    store: str
    sessions: list[str]
    trained: str
    """The session whose tokens a training run has scored."""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = str(tmp_path_factory.mktemp("browser") / "gallery.db")
    sessions = fill(store, 24, turns=16)
    with Reader(store) as reader, Writer(store) as writer:
        writer.add_sync(trained(reader, sessions[1], "run_gallery1", step=4))
    command = [sys.executable, "-m", "bridle", "viewer", "--store", store, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        yield Served(json.loads(viewer.stdout.readline())["url"], store, sessions, sessions[1])
        viewer.terminate()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "apt-get install chromium"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page on which no script fails, nothing is logged, and nothing comes from elsewhere."""
    opened = chromium.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    own = ("http://127.0.0.1:", "file://")
    opened.route(lambda url: not url.startswith(own), lambda route: route.abort())
    yield opened
    opened.close()
    assert complaints == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The accessibility checks, which npm installs (``make test-browser``)."""
    return (Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js").read_text()
