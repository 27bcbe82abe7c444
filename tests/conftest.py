"""Every store that a test makes is audited when the test is over."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from reconstruct.audit import audit
from store.queries import Reader

AUDITED = ("bridle", "conformance", "dialects", "harnesses", "lineage", "proxy", "reconstruct")
"""Rooms whose tests record what holds together unless they are marked ``damages_store``."""

AuditStore = Callable[[Path], None]


@pytest.fixture(scope="session")
def audit_store() -> AuditStore:
    """Audits one SQLite store, bodies included: for fixtures that keep theirs for many tests."""
    return _audit


@pytest.fixture(autouse=True)
def stores_are_audited(request: pytest.FixtureRequest) -> Iterator[None]:
    """Audits every SQLite store under the test's ``tmp_path``."""
    room = Path(request.path).parent.name
    if room not in AUDITED or "tmp_path" not in request.fixturenames:
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    yield
    if request.node.get_closest_marker("damages_store") is not None:
        return
    for path in folder.rglob("*.db"):
        if _is_store(path):
            _audit(path)


def _audit(path: Path) -> None:
    with Reader(str(path)) as reader:
        violations = [v for found in audit(reader, bodies=True) for v in found.violations]
        assert not violations, f"{path} does not hold together: {violations[:5]}"


def _is_store(path: Path) -> bool:
    """Whether it is a database with our tables; some tests make files that are not."""
    with closing(sqlite3.connect(path)) as connection:
        try:
            tables = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'spans'")
            return tables.fetchone() is not None
        except sqlite3.DatabaseError:
            return False
