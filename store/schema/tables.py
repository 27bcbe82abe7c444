"""The tables. Alembic's migrations in ``store/migrations`` build exactly these.

Token ids are packed little-endian ``uint32``, logprobs little-endian ``float32``, both compressed
with zstandard when that is smaller (``store/encoding/packing.py``). What a call says in text is one
packed value, ``calls.texts`` (``store/encoding/texts.py``). Times are seconds since the epoch.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from bridle.store.records import SHORT_TEXT
from bridle.store.schema.columns import Digest

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

writers = Table(
    "writers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process", Text, nullable=False),
    Column("started_at", Float(53), nullable=False),
    Column("seen_at", Float(53), nullable=False),
    Column("lease", Float(53), nullable=False),
    Column("batch", BigInteger, nullable=False),
)
"""The processes that write: who is alive (``liveness.py``), and in a server's database each
one's last commit."""

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("name", Text),
    Column("config", JSON, nullable=False),
    Column("started_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Column("status", String(32), nullable=False),
)

tasks = Table(
    "tasks",
    metadata,
    Column("suite", String(SHORT_TEXT), primary_key=True),
    Column("split", String(32), primary_key=True),
    Column("id", String(SHORT_TEXT), primary_key=True),
    Column("payload", JSON, nullable=False),
    Column("created_at", Float(53), nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("run_id", String(64), ForeignKey("runs.id")),
    Column("task_suite", String(SHORT_TEXT)),
    Column("task_split", String(32)),
    Column("task_id", String(SHORT_TEXT)),
    Column("group_id", String(SHORT_TEXT)),
    Column("harness", String(SHORT_TEXT)),
    Column("name", String(256), unique=True),
    Column("key_hash", String(64), unique=True),
    Column("expires_at", Float(53)),
    Column("continuation", String(16), nullable=False),
    Column("settings", JSON, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("sealed_at", Float(53)),
    Column("outcome", String(32)),
    ForeignKeyConstraint(
        ["task_suite", "task_split", "task_id"], ["tasks.suite", "tasks.split", "tasks.id"]
    ),
    Index(None, "run_id"),
    Index(None, "group_id"),
    Index(None, "created_at"),
    Index(None, "sealed_at"),
    Index(
        "ix_sessions_anonymous",
        # With the last two alone SQLite takes another index and sorts.
        *("key_hash", "name", "created_at", "id"),
        sqlite_where=text("name IS NULL AND key_hash IS NULL"),
        postgresql_where=text("name IS NULL AND key_hash IS NULL"),
    ),
)

calls = Table(
    "calls",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("session_id", String(64), ForeignKey("sessions.id"), nullable=False),
    Column("writer_id", String(64), nullable=False),
    Column("dialect", String(16), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("role", Text),
    Column("status", String(16), nullable=False),
    Column("reason", Text),
    Column("stream", Boolean, nullable=False),
    Column("parent_call_id", String(64)),
    Column("lineage_rule", String(32)),
    Column("break_reason", String(32)),
    Column("model_requested", Text, nullable=False),
    Column("model_served", Text),
    Column("prompt_span_id", String(80)),
    Column("prompt_tokens", Integer),
    Column("sampled_tokens", Integer),
    Column("version_start", BigInteger),
    Column("version_end", BigInteger),
    Column("finish_reason", String(32)),
    Column("request_body_id", Digest(32)),
    Column("response_body_id", Digest(32)),
    Column("request_base_id", String(64)),
    Column("request_depth", Integer, nullable=False, server_default="0"),
    Column("template_id", LargeBinary(8)),
    Column("headers", JSON, nullable=False),
    Column("sampling", JSON, nullable=False),
    Column("usage", JSON, nullable=False),
    Column("texts", LargeBinary),
    Column("error", JSON, nullable=False),
    Column("notes", JSON, nullable=False),
    Column("started_at", Float(53), nullable=False),
    Column("first_token_at", Float(53)),
    Column("ended_at", Float(53)),
    Column("kind_set", String(16)),
    Column("role_set", Text),
    Column("kind_by", Text),
    Index(None, "session_id", "started_at"),
    Index(
        "ix_calls_open",
        "writer_id",
        sqlite_where=text("status = 'open'"),
        postgresql_where=text("status = 'open'"),
    ),
)

"""A request of depth 0 is whole in ``bodies``; any other is a splice of the request of
``request_base_id``, or of the parent call where that is NULL, and is in ``texts``. While the call
runs, ``texts`` is NULL and the splice is in ``running``. Headers, sampling and usage are the JSON
``null`` where they are the template's (``store/writing/rows.py``). ``kind_set`` and ``role_set``
are what a person (``kind_by``) says that the call was for."""

running = Table(
    "running",
    metadata,
    Column("call_id", String(64), ForeignKey("calls.id"), primary_key=True),
    Column("prefix", Integer, nullable=False),
    Column("suffix", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""Requests of calls that have not ended; the end of a call takes its row away, so that what is kept
for good is written once and leaves no hole. A call that died keeps its row."""

vocabularies = Table(
    "vocabularies",
    metadata,
    Column("id", Digest(32), primary_key=True),
    Column("data", LargeBinary, nullable=False),
)
"""The bytes of every token of each tokenizer in use (``store/encoding/vocabulary.py``)."""

templates = Table(
    "templates",
    metadata,
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("id", LargeBinary(8), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("vocabulary_id", Digest(32), ForeignKey("vocabularies.id")),
    Column("fields", JSON, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""What one call of a session has in common with later ones of its kind. ``data`` are its texts as
they are laid out, against which theirs are packed, with the text of their tokens in that
vocabulary; ``fields`` its headers, sampling and usage."""

spans = Table(
    "spans",
    metadata,
    Column("call_id", String(64), ForeignKey("calls.id"), primary_key=True),
    Column("choice", Integer, primary_key=True, autoincrement=False),
    Column("parent_call_id", String(64)),
    Column("parent_choice", Integer),
    Column("start", Integer, nullable=False),
    Column("length", Integer, nullable=False),
    Column("finish_reason", String(32)),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary),
    Column("versions", JSON, nullable=False),
    Column("checksum", LargeBinary(8), nullable=False),
)
"""``choice`` is -1 for the observed tokens of a call. The parent is a span of ``parent_call_id``,
or of the same call where that is NULL; where ``parent_choice`` is NULL there is none."""

bodies = Table(
    "bodies",
    metadata,
    Column("id", Digest(32), primary_key=True),
    Column("base_id", Digest(32)),
    Column("prefix", Integer, nullable=False),
    Column("suffix", Integer, nullable=False),
    Column("size", Integer, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""Bodies stored whole; those of stores older than 0004 may have a base."""

rewards = Table(
    "rewards",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("session_id", String(64), ForeignKey("sessions.id"), nullable=False),
    Column("call_id", String(64)),
    Column("turn", Integer),
    Column("name", String(SHORT_TEXT), nullable=False),
    Column("value", Float(53), nullable=False),
    Column("source", String(SHORT_TEXT)),
    Column("detail", JSON, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Index(None, "session_id"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("consumer", String(64), primary_key=True),
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("lease_id", String(64), nullable=False),
    Column("until", Float(53)),
    Index(None, "session_id"),
)
"""``until`` is NULL once the delivery is acknowledged (``store/operations/deliveries.py``)."""

samples = Table(
    "samples",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("session_id", String(64), ForeignKey("sessions.id"), nullable=False),
    Column("builder", String(32), nullable=False),
    Column("builder_version", Integer, nullable=False),
    Column("policy", JSON, nullable=False),
    Column("leaf_call_id", String(64), nullable=False),
    Column("segments", JSON, nullable=False),
    Column("weight", Float(53), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Index(None, "session_id", "builder"),
)

policies = Table(
    "policies",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("version", BigInteger, primary_key=True),
    Column("path", Text),
    Column("digest", String(64)),
    Column("verified", Boolean, nullable=False),
    Column("logprob_gap", Float(53)),
    Column("published_at", Float(53), nullable=False),
)

served = Table(
    "served",
    metadata,
    Column("engine", String(512), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("model", Text),
    Column("told_at", Float(53), nullable=False),
    Column("weights_fingerprint", Text),
)
"""What each engine was last said to serve: proxies read it at start-up.
``weights_fingerprint`` is what the engine then reported of its weights."""

metrics = Table(
    "metrics",
    metadata,
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("name", String(SHORT_TEXT), primary_key=True),
    Column("value", Float(53)),
    Column("at", Float(53), nullable=False),
)
"""``value`` is NULL where it was not a number: SQLite has no NaN."""
