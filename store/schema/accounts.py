"""The account of sampled tokens, as SQL: the view ``token_accounts`` and the queries of readers.

Every sampled token of a session has one fate. The account of a session is the first of these that
applies:

1. The account of the training run that took the session last (``trained_by``), as the run wrote it.
   Tokens that the session sampled afterwards are ``dropped: recorded_later``.
2. ``dropped: evaluation``, if the session belongs to an evaluation and no training took it.
3. The account by the rules that ``bridle audit`` has written, if it covers all of its calls:
   ``trainable``, or not by a rule.
4. ``uncounted``: :mod:`bridle.reconstruct.accounts` counts these tokens by the rules.

So the tokens of any set of sessions add up to those that its calls sampled.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CompoundSelect,
    Connection,
    Select,
    and_,
    case,
    cast,
    func,
    literal_column,
    null,
    select,
    union_all,
)

from bridle.store.schema.derived import session_totals
from bridle.store.schema.tables import calls, runs, sessions, token_fates

BY_RULES: Final = ""
"""The ``run_id`` of an account that no training run has written."""
EVALUATION: Final = "eval"
"""The kind of runs whose sessions are held out."""


class Fate(NamedTuple):
    """The fate of a sampled token."""

    fate: str
    """The name of the fate: ``trained``, ``trainable``, ``masked``, ``dropped`` or
    ``uncounted``."""
    reason: str = ""
    """The reason of a masked or dropped token; empty for other fates."""


TRAINED: Final = Fate("trained")
TRAINABLE: Final = Fate("trainable")
UNCOUNTED: Final = Fate("uncounted")
HELD_OUT: Final = Fate("dropped", "evaluation")
RECORDED_LATER: Final = Fate("dropped", "recorded_later")


def evaluation_of(run_id: str) -> str:
    """Return the id of the run that a training run's held-out sessions belong to."""
    return f"{run_id}.eval"


def accounts_with(run_id: str) -> list[str]:
    """Return the runs whose accounts have the sessions of a run: itself, and one it evaluates."""
    trained = run_id.removesuffix(".eval")
    return [run_id] if trained == run_id else [run_id, trained]


def ids_in_account(run_id: str) -> CompoundSelect[Any]:
    """Return the query of the ids of the sessions that belong to the account of a run."""
    own, trained = members_of(run_id)
    return own.union(trained)


def members_of(run_id: str) -> tuple[Select[Any], Select[Any]]:
    """Return the queries of the ids of two sets of sessions in the account of a run.

    They are the sessions of the run and of its evaluation, and those that it has trained on.
    """
    own = select(sessions.c.id).where(sessions.c.run_id.in_([run_id, evaluation_of(run_id)]))
    trained = select(token_fates.c.session_id.label("id")).where(token_fates.c.run_id == run_id)
    return own, trained


def account_rows(
    chosen: Select[Any] | None = None, run_id: str | None = None
) -> CompoundSelect[Any]:
    """Return a query for the rows of accounts.

    A row has ``session_id``, ``trained_by``, ``fate``, ``reason`` and ``tokens``. ``chosen``
    selects the ids of some sessions; ``None`` takes all. The account of the run ``run_id`` takes
    precedence over that of a later run.
    """

    ids = None if chosen is None else chosen.cte("chosen")

    def inside(column: ColumnElement[Any]) -> list[ColumnElement[bool]]:
        return [] if ids is None else [column.in_(select(ids.c.id))]

    written = (
        select(
            token_fates.c.session_id,
            token_fates.c.run_id,
            func.sum(token_fates.c.tokens).label("tokens"),
            func.max(token_fates.c.at).label("at"),
        )
        .where(*inside(token_fates.c.session_id))
        .group_by(token_fates.c.session_id, token_fates.c.run_id)
        .subquery("written")
    )
    first: list[Any] = [] if run_id is None else [(written.c.run_id == run_id, literal_column("0"))]
    order = case(
        *first,
        (written.c.run_id != literal_column("''"), literal_column("1")),
        else_=literal_column("2"),
    )
    ranked = select(
        written,
        func.row_number()
        .over(
            partition_by=written.c.session_id,
            order_by=[order, written.c.at.desc(), written.c.run_id.desc()],
        )
        .label("place"),
    ).subquery("ranked")
    counted = (
        select(func.sum(calls.c.sampled_tokens))
        .where(calls.c.session_id == sessions.c.id)
        .correlate(sessions)
        .scalar_subquery()
    )
    is_summed = session_totals.c.session_id.is_not(None)
    captured = func.coalesce(
        # Cast, because a damaged value must not spoil the sums of other sessions.
        case((is_summed, cast(session_totals.c.sampled_tokens, BigInteger)), else_=counted),
        literal_column("0"),
    )
    source = case(
        (ranked.c.run_id != literal_column("''"), literal_column("'training'")),
        (runs.c.kind == literal_column(f"'{EVALUATION}'"), literal_column("'evaluation'")),
        (ranked.c.tokens == captured, literal_column("'rules'")),
        else_=literal_column("'none'"),
    )
    heads = (
        select(
            sessions.c.id.label("session_id"),
            captured.label("captured"),
            ranked.c.run_id,
            ranked.c.tokens,
            source.label("source"),
        )
        .select_from(
            sessions.outerjoin(runs, runs.c.id == sessions.c.run_id)
            .outerjoin(session_totals, session_totals.c.session_id == sessions.c.id)
            .outerjoin(
                ranked,
                and_(ranked.c.session_id == sessions.c.id, ranked.c.place == literal_column("1")),
            )
        )
        .where(*inside(sessions.c.id))
        .cte("heads")
    )
    is_written = heads.c.source.in_([literal_column("'training'"), literal_column("'rules'")])
    fates = (
        select(
            heads.c.session_id,
            func.nullif(heads.c.run_id, literal_column("''")).label("trained_by"),
            token_fates.c.fate,
            token_fates.c.reason,
            token_fates.c.tokens,
        )
        .join(
            token_fates,
            and_(
                token_fates.c.session_id == heads.c.session_id,
                token_fates.c.run_id == heads.c.run_id,
            ),
        )
        .where(is_written, token_fates.c.tokens != literal_column("0"))
    )

    def whole(fate: Fate, name: str, run: Any, tokens: Any) -> Select[Any]:
        """Return the query that gives remaining tokens one fate.

        They are the remaining ``tokens`` of all sessions of one source.
        """
        return select(
            heads.c.session_id,
            run.label("trained_by"),
            literal_column(f"'{fate.fate}'").label("fate"),
            literal_column(f"'{fate.reason}'").label("reason"),
            tokens.label("tokens"),
        ).where(heads.c.source == literal_column(f"'{name}'"), tokens > literal_column("0"))

    later = heads.c.captured - heads.c.tokens
    return union_all(
        fates,
        whole(RECORDED_LATER, "training", heads.c.run_id, later),
        whole(HELD_OUT, "evaluation", null(), heads.c.captured),
        whole(UNCOUNTED, "none", null(), heads.c.captured),
    )


def create_view(connection: Connection) -> None:
    rows = account_rows().compile(
        dialect=connection.dialect, compile_kwargs={"literal_binds": True}
    )
    connection.exec_driver_sql(f"CREATE VIEW token_accounts AS {rows}")
