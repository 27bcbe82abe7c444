"""Bundles: pages as files that link to each other, of the chosen sessions alone."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.errors import BridleError, UsageError
from bridle.viewer.bundle import INDEX, Scope, write_bundle
from bridle.viewer.rendering import Source

LINK = re.compile(r'<(\w+) [^>]*?(?:href|src)="([^"]*)"')


def written(gallery: Any, folder: Path, scope: Scope) -> dict[str, str]:
    """The text of each page of a bundle, by the name of its file."""
    pages = write_bundle(Source(gallery.reader, "gallery"), scope, folder)
    return {page.name: page.read_text() for page in pages}


def assert_whole(folder: Path, pages: dict[str, str]) -> None:
    """Every link leads to a file of the bundle, and to an element of it; nothing asks a server."""
    for name, text in pages.items():
        for _, target in LINK.findall(text):
            file, _, part = unescape(target).partition("#")
            assert (folder / (file or name)).is_file(), (name, target)
            if part:
                assert f'id="{part}"' in pages[file or name], (name, target)
        assert not re.search(r"\shx-", text), name
        assert text.count("<form") == text.count('<form method="dialog"'), name


def test_a_run_is_bundled_with_its_sessions_and_groups(gallery: Any, tmp_path: Path) -> None:
    own = tuple(record.id for record in gallery.reader.sessions(run="run_gallery1"))
    pages = written(gallery, tmp_path, Scope(own, "/runs/run_gallery1", "run_gallery1"))
    assert_whole(tmp_path, pages)
    assert {"sessions.html", "groups.html", "audit.html", INDEX} <= set(pages)
    assert "Sessions over time" in pages[INDEX]
    assert sum(name.startswith("group-") for name in pages) == 3
    for session in own:
        assert {f"sessions-{session}{of}.html" for of in ("", "-tree", "-audit")} <= set(pages)
    others = set(gallery.sessions) - set(own)
    assert not [name for name, text in pages.items() if any(one in text for one in others)]


def test_a_session_is_bundled_whole_and_alone(gallery: Any, tmp_path: Path) -> None:
    session, number = gallery.broken()
    pages = written(gallery, tmp_path, Scope((session,), f"/sessions/{session}"))
    assert_whole(tmp_path, pages)
    assert len(pages) == 3
    turns = gallery.reader.calls(session)
    assert pages[INDEX].count('<article class="turn"') == len(turns) > 12 - 6
    assert pages[INDEX].count("<token-strip>") == sum(bool(turn.sampled_tokens) for turn in turns)
    assert "recorded tokens are continued" in pages[INDEX]
    assert "Annotate" not in pages[INDEX]
    assert gallery.store not in "".join(pages.values())
    (tree,) = (text for name, text in pages.items() if name.endswith("tree.html"))
    assert f"{INDEX}#turn-{number}" in tree


def test_a_list_goes_on_over_pages(gallery: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("bridle.viewer.app.PAGE", 4)
    chosen = tuple(gallery.sessions[-6:])
    pages = written(gallery, tmp_path, Scope(chosen, "/sessions"))
    assert_whole(tmp_path, pages)
    assert "6 sessions" in pages[INDEX]
    assert 'rel="next" href="sessions-page-2.html"' in pages[INDEX]
    assert f'rel="prev" href="{INDEX}"' in pages["sessions-page-2.html"]


def test_a_folder_with_files_is_refused(gallery: Any, tmp_path: Path) -> None:
    (tmp_path / "own.txt").touch()
    with pytest.raises(UsageError, match="is no empty folder: name a new one"):
        written(gallery, tmp_path, Scope(gallery.sessions, "/sessions"))
    assert [file.name for file in tmp_path.iterdir()] == ["own.txt"]


def test_a_page_that_cannot_be_made_ends_the_bundle(gallery: Any, tmp_path: Path) -> None:
    with pytest.raises(BridleError, match="/sessions/none cannot be made: status 404"):
        written(gallery, tmp_path, Scope(("none",), "/sessions/none"))


def bridle(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["viewer", *map(str, arguments)])


def test_the_command_bundles_what_it_is_given(gallery: Any, tmp_path: Path) -> None:
    session = gallery.sessions[3]
    for about, limit, first in (
        ((session,), 9, session),
        (("run_gallery2",), 3, "gallery 2"),
        ((), 2, "2 sessions"),
    ):
        folder = tmp_path / f"of-{limit}"
        options = ("--store", gallery.store, "--bundle", folder, "--limit", limit)
        done = bridle(*about, *options)
        assert done.exit_code == 0, done.output
        assert str(folder / INDEX) in done.output
        assert first in (folder / INDEX).read_text()
    refused = bridle(session, "--store", gallery.store)
    assert refused.exit_code == 2
    assert "--bundle" in refused.output
