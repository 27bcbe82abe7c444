"""The form of ``bridle viewer`` records like ``bridle reward`` and refuses the same."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bridle.cli.commands.viewer import _recording
from bridle.store.reading.queries import Reader
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source
from bridle.viewer.scoring import ScoreForm


@pytest.fixture
def scoring(gallery: Any, tmp_path: Path) -> Iterator[tuple[TestClient, Reader]]:
    """The pages of ``bridle viewer`` over a copy of the gallery."""
    store = str(tmp_path / "copy.db")
    shutil.copyfile(gallery.store, store)
    Path(store).chmod(0o600)
    with Reader(store) as reader:
        form = ScoreForm("the-token", near=True, record=_recording(store, reader))
        yield (
            TestClient(viewer_app(Source(reader, store, form=form)), follow_redirects=False),
            reader,
        )


def test_a_click_is_a_reward_of_the_operator(gallery: Any, scoring: Any) -> None:
    client, reader = scoring
    page = f"/sessions/{gallery.sessions[6]}"
    assert 'value="0.5" aria-pressed="false"' in client.get(page).text
    form = {"token": "the-token", "name": "reward", "value": "0.5"}
    reply = client.post(f"{page}/rewards", data=form)
    assert (reply.status_code, reply.headers["location"]) == (303, page)
    (given,) = reader.rewards(gallery.sessions[6])
    assert (given.name, given.value, given.source) == ("reward", 0.5, "operator")
    assert re.search('value="0.5" aria-pressed="true"', client.get(page).text)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"token": "guess"}, 403, "open the session"),
        ({"value": "much"}, 422, "value is a number, not"),
        ({"value": "inf"}, 422, "a finite number"),
        ({"value": ""}, 422, "value is a number"),
        ({"name": ""}, 422, "1 to"),
        ({"turn": "99"}, 404, "has turns 1 to"),
        ({"turn": "x"}, 422, "turn is a number"),
        ({"note": "x" * 20_000}, 413, "too long"),
    ],
)
def test_a_form_that_cannot_be_recorded_is_refused(
    gallery: Any, scoring: Any, change: dict[str, str], status: int, words: str
) -> None:
    client, reader = scoring
    session = gallery.sessions[6]
    form = {"token": "the-token", "name": "reward", "value": "1", **change}
    reply = client.post(f"/sessions/{session}/rewards", data=form)
    assert (reply.status_code, words in reply.text) == (status, True), reply.text
    assert reader.rewards(session) == []
    assert client.get(f"/sessions/{session}/rewards").status_code == 405
