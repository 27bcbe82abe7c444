"""Pages, facts and figures are the same on PostgreSQL, whose times and JSON have other types."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.store import released
from tests.store.conftest import Postgres
from tests.store.conftest import postgres as postgres

from bridle.diagnosis.facts import read_facts
from bridle.diagnosis.pages import SessionOrder, choices, placed_sessions, session_lines
from bridle.store.operations.copying import copy_store
from bridle.store.reading.accounts import stored_account, written_accounts
from bridle.store.reading.activity import activity
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.schema.database import migrate
from bridle.viewer.app import number_of

pytestmark = pytest.mark.postgres


def shown(url: str) -> dict[str, Any]:
    """Return the lines, facts and figures that people see of a store."""
    with Reader(url) as reader:
        number = number_of(reader)
        wanted = SessionFilter()
        return {
            **{
                order.value: session_lines(reader, wanted, order, number=number, limit=9)
                for order in SessionOrder
            },
            "text": session_lines(reader, SessionFilter(text="is there"), number=number, limit=9),
            "choices": choices(reader),
            "placed": placed_sessions(reader, wanted, number),
            "facts": asdict(read_facts(reader, number)),
            "activity": activity(reader, 0.0),
            "account": stored_account(reader, wanted),
            "accounts": written_accounts(reader, wanted),
            "idle": reader.idle_sessions(1e10),
        }


def test_what_people_see_is_the_same_on_both_databases(tmp_path: Path, postgres: Postgres) -> None:
    path, url = str(tmp_path / "store.db"), postgres.empty_database()
    migrate(path)
    released.fill(path)
    copy_store(path, url)
    back = str(tmp_path / "back.db")  # with its times to the microsecond
    copy_store(url, back)
    there, here = shown(url), shown(back)
    assert here["text"], "the text is found"
    for name, value in here.items():
        assert there[name] == value, name
