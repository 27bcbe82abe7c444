"""The reason why a prompt left the tokens that it continues, from the record.

``tests/lineage/test_breaks.py`` has the cases, by template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.records import BreakReason
from bridle.store.schema.database import connect, transaction
from bridle.store.schema.tables import spans

NO_BASE: dict[str, Any] = {"tail": [], "lineage": {}}


@pytest.fixture
def broken(record: Callable[..., Any]) -> Any:
    """A session whose second call dropped the reasoning of the first.

    Its third call is exact, and its fourth was rendered with another first message.
    """
    session = record()
    thought = {"content": "yes", "reasoning": "Hm."}
    first = session.call([1, 2, 3], [7, 8, 9], conversation=NO_BASE, message=thought)
    second = session.call(
        [1, 2, 3, 8, 9, 4],
        [5, 6],
        parent=first,
        conversation={"tail": [], "lineage": {"base": first, "differs": ("reasoning",)}},
        break_reason=BreakReason.UNEXPLAINED,
    )
    session.call([1, 2, 3, 8, 9, 4, 5, 6, 4], [5], parent=second)
    session.call(
        [1, 4, 3, 8, 9, 4, 5, 6, 4],
        [5],
        parent=second,
        conversation={"tail": [], "lineage": {"base": second}},
        break_reason=BreakReason.UNEXPLAINED,
    )
    return session


def reasons(session: LoadedSession) -> list[BreakReason | None]:
    return [call.break_reason for call in session.calls]


def test_a_loaded_session_has_the_reasons_of_its_breaks(broken: Any, reader: Any) -> None:
    assert reasons(LoadedSession.load(reader, broken.id)) == [
        None,
        BreakReason.REASONING_DROPPED,
        None,
        BreakReason.TEMPLATE_REWROTE_HISTORY,
    ]


@pytest.mark.damages_store
def test_a_break_whose_tokens_are_gone_stays_unexplained(
    broken: Any, reader: Any, url: str
) -> None:
    engine = connect(url)
    first = reader.calls(broken.id)[0].id
    with transaction(engine) as connection:
        connection.execute(spans.delete().where(spans.c.call_id == first))
    engine.dispose()
    session = LoadedSession.load(reader, broken.id)
    assert reasons(session).count(BreakReason.UNEXPLAINED) == 2
    with pytest.raises(BrokenTree, match="missing"):
        _ = session.tree


@pytest.mark.damages_store
def test_a_span_cannot_hang_on_one_outside_the_tree(broken: Any, reader: Any, url: str) -> None:
    engine = connect(url)
    first = reader.calls(broken.id)[0].id
    with transaction(engine) as connection:
        own = (spans.c.call_id == first) & (spans.c.choice == -1)
        connection.execute(spans.update().where(own).values(start=-1))
    engine.dispose()
    with pytest.raises(BrokenTree, match="whose place is not known"):
        _ = LoadedSession.load(reader, broken.id).tree
