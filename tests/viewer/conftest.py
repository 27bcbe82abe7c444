"""A store with sessions of every sort, and the viewer over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fastapi.testclient import TestClient

from bridle.bench.gallery import fill
from bridle.store.reading.queries import Reader
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source


@dataclass(frozen=True)
class Gallery:
    """The store, its sessions (oldest first) and a client of its pages."""

    store: str
    sessions: list[str]
    reader: Reader
    client: TestClient

    def page(self, path: str, **headers: str) -> str:
        """A page that must be there."""
        reply = self.client.get(path, headers=headers)
        assert reply.status_code == 200, (path, reply.status_code, reply.text[:500])
        return reply.text

    def broken(self) -> tuple[str, int]:
        """A session with a break, and the turn that broke."""
        for session in self.sessions:
            for number, call in enumerate(self.reader.calls(session), start=1):
                if call.break_reason is not None:
                    return session, number
        raise AssertionError("no session of the gallery has a break")


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    store = str(tmp_path_factory.mktemp("gallery") / "gallery.db")
    sessions = fill(store, 24, turns=6)
    with Reader(store) as reader:
        client = TestClient(viewer_app(Source(reader, store)))
        yield Gallery(store, sessions, reader, client)
