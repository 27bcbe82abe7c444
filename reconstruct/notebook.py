"""Recorded sessions as notebooks show them: one as HTML, several as a pandas frame."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any, Final

from bridle.errors import BridleError
from bridle.reconstruct.rewards import CountedRewards
from bridle.reconstruct.session import LoadedSession
from bridle.store.call import CallRow
from bridle.store.reading.session_filter import OPEN

if TYPE_CHECKING:
    import pandas as pd

TURNS: Final = 20
"""Maximum turns in a session's HTML."""
_REPLY: Final = 120
"""Maximum characters of a reply in it."""
COLUMNS: Final = (
    *("id", "name", "run_id", "group_id", "task_suite", "task_split", "task_id", "harness"),
    *("outcome", "created_at", "sealed_at", "calls", "sampled_tokens", "reward"),
)
"""The columns of :func:`sessions_frame` before those of named rewards."""


class PandasMissing(BridleError):
    """A frame was requested, but pandas is not installed."""


def sessions_frame(sessions: Iterable[LoadedSession]) -> pd.DataFrame:
    """Return a frame with a row for each session and the columns :data:`COLUMNS`.

    Times are in seconds since the epoch. ``reward`` is the session's number, and a column
    ``reward.NAME`` has its reward of each name; a missing one is NaN.

    Raise :class:`PandasMissing` if pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise PandasMissing(f"to_pandas() needs pandas: pip install pandas ({error})") from error
    rows, counted = [], None
    for session in sessions:
        counted = counted or CountedRewards(session.reader)
        number = counted.aggregation(session.record.run_id).value(session.all_rewards)
        rows.append(_row(session, number))
    named = sorted({name for row in rows for name in row} - set(COLUMNS))
    return pd.DataFrame(rows, columns=[*COLUMNS, *named])


def _row(session: LoadedSession, number: float | None) -> dict[str, Any]:
    record = session.record
    counts = {"calls": len(session.calls), "sampled_tokens": session.captured, "reward": number}
    named = {f"reward.{name}": value for name, value in session.rewards.items()}
    facts = {name: getattr(record, name) for name in COLUMNS if name not in counts}
    return facts | counts | named


def session_html(session: LoadedSession) -> str:
    """Return a session in a few lines of HTML: its facts, and a table of its first turns.

    Recorded text is escaped and cut.
    """
    record = session.record
    facts = [record.harness, record.outcome or OPEN, f"{len(session.calls)} calls"]
    facts += [f"{session.captured:,} sampled tokens"]
    facts += [f"{name} {value:g}" for name, value in session.rewards.items()]
    more = len(session.calls) - TURNS
    rest = f"<p>{more:,} more turns</p>" if more > 0 else ""
    return (
        f"<p><b>{escape(record.name or record.id)}</b> "
        f"{escape(' · '.join(fact for fact in facts if fact))}</p>"
        "<table><thead><tr><th>Turn</th><th>Kind</th><th>Status</th><th>Tokens in</th>"
        "<th>Sampled</th><th>Reply</th></tr></thead><tbody>"
        + "".join(_turn(number, call) for number, call in enumerate(session.calls[:TURNS], 1))
        + f"</tbody></table>{rest}"
    )


def _turn(number: int, call: CallRow) -> str:
    reply = ""
    if call.replies:
        message = call.replies[0]
        parts = [message.content if isinstance(message.content, str) else ""]
        parts += [f"{tool.name}({tool.arguments})" for tool in message.tool_calls]
        reply = " ".join(" ".join(parts).split())
    shown = reply if len(reply) <= _REPLY else f"{reply[:_REPLY]}…"
    cells = (number, call.kind, call.status, call.prompt_tokens, call.sampled_tokens, shown)
    return "<tr>" + "".join(f"<td>{escape(_cell(cell))}</td>" for cell in cells) + "</tr>"


def _cell(value: object) -> str:
    return "–" if value is None else str(value)
