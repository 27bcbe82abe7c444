"""Text is stored once, as tokens: what a call says is one value, packed against its spans' text.

Spans are named by their call and choice, and bodies that go on from another are in the call's own
row. Upwards, old bodies stay where they are; downwards, every body becomes a row of ``bodies``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql, sqlite

from bridle.store.encoding import bodies
from bridle.store.encoding.packing import DICTIONARY, pack, unpack, unpack_against, unpack_logprobs
from bridle.store.encoding.text_reader import PackedTexts, TextReader
from bridle.store.encoding.texts import Texts, lay_out
from bridle.store.reading import loading as stored
from bridle.store.writing.rows import body_row, expected_usage, running_row, span_id, span_place

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_AT_ONCE = 200
_EMPTY = b"{}"
"""How an empty message or conversation was written."""


def upgrade() -> None:
    op.create_table(
        "vocabularies",
        sa.Column("id", sa.LargeBinary(length=32), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_vocabularies")),
    )
    op.create_table(
        "templates",
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("id", sa.LargeBinary(length=8), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("vocabulary_id", sa.LargeBinary(length=32), nullable=True),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_templates_session_id_sessions")
        ),
        sa.ForeignKeyConstraint(
            ["vocabulary_id"],
            ["vocabularies.id"],
            name=op.f("fk_templates_vocabulary_id_vocabularies"),
        ),
        sa.PrimaryKeyConstraint("session_id", "id", name=op.f("pk_templates")),
    )
    op.add_column("calls", sa.Column("request_base_id", sa.String(length=64), nullable=True))
    op.add_column(
        "calls", sa.Column("request_depth", sa.Integer(), server_default="0", nullable=False)
    )
    op.add_column("calls", sa.Column("template_id", sa.LargeBinary(length=8), nullable=True))
    op.add_column("calls", sa.Column("texts", sa.LargeBinary(), nullable=True))
    _join_texts()
    op.drop_column("calls", "conversation")
    op.drop_column("calls", "message")
    op.create_table(
        "running",
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.Integer(), nullable=False),
        sa.Column("suffix", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name=op.f("fk_running_call_id_calls")),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_running")),
    )
    op.drop_index(op.f("ix_spans_session_id"), table_name="spans")
    _put_aside("spans")
    op.create_table(
        "spans",
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("choice", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_call_id", sa.String(length=64), nullable=True),
        sa.Column("parent_choice", sa.Integer(), nullable=True),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(length=8), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name=op.f("fk_spans_call_id_calls")),
        sa.PrimaryKeyConstraint("call_id", "choice", name=op.f("pk_spans")),
    )
    _copy_spans(_span_by_place)


def downgrade() -> None:
    for name in ("message", "conversation"):
        empty = sa.text("''")
        op.add_column(
            "calls", sa.Column(name, sa.LargeBinary(), server_default=empty, nullable=False)
        )
    _part_texts()
    _put_aside("spans")
    op.create_table(
        "spans",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("parent_id", sa.String(length=80), nullable=True),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=True),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(length=8), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_spans_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_spans")),
    )
    op.create_index(op.f("ix_spans_session_id"), "spans", ["session_id"])
    _copy_spans(_span_by_name)
    for table in ("running", "templates", "vocabularies"):
        op.drop_table(table)
    for name in ("texts", "template_id", "request_depth", "request_base_id"):
        op.drop_column("calls", name)


_OF_TEMPLATE = ("headers", "sampling", "usage")

_CALLS = sa.table(
    "calls",
    *(
        sa.column(name)
        for name in (
            *("id", "session_id", "started_at", "parent_call_id", "request_body_id"),
            *("request_base_id", "request_depth", "response_body_id", "template_id", "texts"),
            *("message", "conversation", "prompt_tokens", "sampled_tokens"),
        )
    ),
    *(sa.column(name, sa.JSON()) for name in _OF_TEMPLATE),
)
_TEMPLATES = sa.table(
    "templates", sa.column("session_id"), sa.column("id"), sa.column("fields", sa.JSON())
)
_BODIES = sa.table(
    "bodies",
    *(sa.column(name) for name in ("id", "base_id", "prefix", "suffix", "size", "depth", "data")),
)


def _join_texts() -> None:
    """Messages and conversations into ``texts``; bodies are left where they are."""
    connection, last = op.get_bind(), ""
    request_row = _BODIES.c.data.label("request_row")
    columns = (_CALLS.c.id, _CALLS.c.message, _CALLS.c.conversation, request_row)
    query = sa.select(*columns).outerjoin(_BODIES, _BODIES.c.id == _CALLS.c.request_body_id)
    update = (
        sa.update(_CALLS)
        .where(_CALLS.c.id == sa.bindparam("call"))
        .values(texts=sa.bindparam("to"))
    )
    while rows := connection.execute(
        query.where(_CALLS.c.id > last).order_by(_CALLS.c.id).limit(_AT_ONCE)
    ).all():
        connection.execute(update, [{"call": row.id, "to": _joined(row)} for row in rows])
        last = rows[-1].id


def _joined(row: Any) -> bytes:
    message, conversation = bytes(row.message), bytes(row.conversation)
    if conversation[0] == DICTIONARY:
        said = unpack_against(conversation, unpack(bytes(row.request_row)))
    else:
        said = unpack(conversation)
    said, told = (b"" if part == _EMPTY else part for part in (said, unpack(message)))
    return pack(lay_out(Texts(None, said, told, None)))


def _part_texts() -> None:
    """Texts into messages, conversations and rows of ``bodies``, session by session."""
    connection, reader = op.get_bind(), TextReader()
    sessions = connection.execute(sa.text("SELECT id FROM sessions")).scalars().all()
    for session_id in sessions:
        rows = connection.execute(
            sa.select(_CALLS)
            .where(_CALLS.c.session_id == session_id)
            .order_by(_CALLS.c.request_depth, _CALLS.c.started_at)
        ).all()
        packed = [PackedTexts.of(row) for row in rows if row.texts is not None]
        read = reader.read(connection, packed)
        fields = {
            bytes(row.id): row.fields
            for row in connection.execute(
                sa.select(_TEMPLATES).where(_TEMPLATES.c.session_id == session_id)
            )
        }
        requests: dict[str, bytes] = {}
        for row in rows:
            texts = read.get(row.id, Texts(None, b"", b"", None))
            _part_request(connection, row, texts, requests)
            if texts.reply is not None:
                _add_body(connection, bodies.whole(texts.reply.data))
            connection.execute(
                sa.update(_CALLS)
                .where(_CALLS.c.id == row.id)
                .values(
                    message=pack(texts.message or _EMPTY),
                    conversation=pack(texts.conversation or _EMPTY),
                    **_told_by_template(row, fields),
                )
            )


def _told_by_template(row: Any, templates: dict[bytes, Any]) -> dict[str, Any]:
    """The columns that were left to the call's template."""
    if row.template_id is None:
        return {}
    fields = templates[bytes(row.template_id)]
    usage = expected_usage(fields["usage"], row.prompt_tokens, row.sampled_tokens)
    told = {**fields, "usage": usage}
    return {name: told[name] for name in _OF_TEMPLATE if getattr(row, name) is None}


def _part_request(
    connection: sa.Connection, row: Any, texts: Texts, requests: dict[str, bytes]
) -> None:
    """A splice becomes a row against its base; ``requests`` are the session's so far, whole."""
    if row.request_body_id is None:
        return
    identifier = bytes(row.request_body_id).hex()
    if not row.request_depth:
        requests[row.id] = stored.body(connection, identifier)
        return
    splice = texts.request or stored.open_request(connection, row.id)
    if splice is None:
        raise ValueError(f"the request of call {row.id} is missing")
    base = requests[row.request_base_id or row.parent_call_id]
    data = requests[row.id] = bodies.proved(splice.apply(base), identifier)
    kept = running_row(row.id, splice)["data"]
    depth, size = row.request_depth, len(data)
    base_id = bodies.body_id(base)
    _add_body(
        connection,
        bodies.BodyRow(identifier, base_id, splice.prefix, splice.suffix, size, depth, kept),
    )


def _add_body(connection: sa.Connection, row: bodies.BodyRow) -> None:
    on_server = connection.dialect.name == "postgresql"
    insert = postgresql.insert(_BODIES) if on_server else sqlite.insert(_BODIES)
    connection.execute(insert.on_conflict_do_nothing(), [body_row(row)])


def _put_aside(table: str) -> None:
    op.rename_table(table, f"{table}_before")
    if op.get_bind().dialect.name == "postgresql":
        # The names of keys are the schema's, and the new table wants them.
        op.execute(f"ALTER TABLE {table}_before RENAME CONSTRAINT pk_{table} TO pk_{table}_before")


def _copy_spans(changed: Any) -> None:
    """Every span from the table that was put aside into the new one."""
    connection = op.get_bind()
    before = sa.Table("spans_before", sa.MetaData(), autoload_with=connection)
    after = sa.Table("spans", sa.MetaData(), autoload_with=connection)
    query = sa.select(before)
    if "session_id" not in before.c:
        query = query.add_columns(_CALLS.c.session_id).join(_CALLS, _CALLS.c.id == before.c.call_id)
    for some in _pages(connection, query, before):
        connection.execute(sa.insert(after), [changed(dict(row._mapping)) for row in some])
    op.drop_table("spans_before")


def _pages(connection: sa.Connection, query: sa.Select[Any], table: sa.Table) -> Iterator[Any]:
    """The rows in the order of their keys, some at a time: a cursor would read what is written."""
    keys = list(table.primary_key)
    last: tuple[Any, ...] | None = None
    while True:
        page = query.order_by(*keys).limit(_AT_ONCE)
        if last is not None:
            page = page.where(sa.tuple_(*keys) > sa.tuple_(*last))
        rows = connection.execute(page).all()
        if not rows:
            return
        yield rows
        last = tuple(rows[-1]._mapping[key.name] for key in keys)


def _span_by_place(row: dict[str, Any]) -> dict[str, Any]:
    call_id, choice = span_place(row["id"])
    parent = (None, None) if row["parent_id"] is None else span_place(row["parent_id"])
    kept = {name: row[name] for name in _KEPT}
    return kept | {
        "call_id": call_id,
        "choice": choice,
        "parent_call_id": None if parent[0] == call_id else parent[0],
        "parent_choice": parent[1],
    }


def _span_by_name(row: dict[str, Any]) -> dict[str, Any]:
    call_id, choice = row["call_id"], row["choice"]
    parent, parent_choice = row["parent_call_id"] or call_id, row["parent_choice"]
    kept = {name: row[name] for name in _KEPT}
    return kept | {
        "id": span_id(call_id, choice),
        "session_id": row["session_id"],
        "call_id": call_id,
        "parent_id": None if parent_choice is None else span_id(parent, parent_choice),
        "kind": "observed" if choice < 0 else "sampled",
        "choice": None if choice < 0 else choice,
        # The codec that they are packed with is newer than the version that is to read them.
        "logprobs": None if choice < 0 else pack(unpack_logprobs(bytes(row["logprobs"])).tobytes()),
    }


_KEPT = ("start", "length", "finish_reason", "token_ids", "logprobs", "versions", "checksum")
