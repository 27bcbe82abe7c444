"""The tables and views. The migrations in ``store/schema/migrations`` build exactly these.

The content of every call is in plain text or JSON columns, each message once; docs/sql.md reads
it with plain SQL. Token ids are packed little-endian ``uint32``, logprobs little-endian
``float32``, both compressed with zstandard when that is smaller (``store/encoding/packing.py``).
Times are seconds since the epoch, and ``timestamptz`` in PostgreSQL (``store/schema/columns.py``).
"""

from __future__ import annotations

from sqlalchemy import (
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

from bridle.store.call import BegunFacts, DecidedFacts, DerivedFacts, EndedFacts, WrittenFacts
from bridle.store.declaration import SHORT_TEXT
from bridle.store.records import LineageState, SessionRecord
from bridle.store.reward import Reward
from bridle.store.schema.columns import PlainJson, Time, WrittenJson, columns
from bridle.store.trained import TrainedSpan

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
    Column("started_at", Time, nullable=False),
    Column("seen_at", Time, nullable=False),
    Column("lease", Float(53), nullable=False),
    Column("batch", BigInteger, nullable=False),
    Column("deployment", Text),
    Column("seen", BigInteger),
    Column("report", PlainJson),
)
"""The processes that write. A row shows whether its process is alive (``liveness.py``) and, in a
server's database, its last commit. The last three columns are set for a proxy: the newest revision
of its deployment that it has read, and its running calls (``store/operations/gates.py``)."""

gates = Table(
    "gates",
    metadata,
    Column("deployment", String(512), primary_key=True),
    Column("policy", String(SHORT_TEXT), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("model", Text),
    Column("paused", Boolean, nullable=False),
    Column("revision", BigInteger, nullable=False),
)
"""The gate of each policy of a deployment: the version under which calls start, and whether new
calls wait (``store/operations/gates.py``). ``revision`` is the deployment's latest change of the
policy or of its engines."""

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("name", Text),
    Column("config", PlainJson, nullable=False),
    Column("started_at", Time, nullable=False),
    Column("ended_at", Time),
    Column("status", String(32), nullable=False),
    Column("reason", Text),
)
"""The runs. ``status``, ``ended_at`` and ``reason`` are those of the latest attempt."""

attempts = Table(
    "attempts",
    metadata,
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("writer_id", String(64)),
    Column("started_at", Time, nullable=False),
    Column("ended_at", Time),
    Column("status", String(32), nullable=False),
    Column("reason", Text),
)
"""Each start of a run, numbered from 1. ``writer_id`` is the writer of the process that runs it: an
attempt whose writer is gone has died with it (``liveness.py``)."""

tasks = Table(
    "tasks",
    metadata,
    Column("suite", String(SHORT_TEXT), primary_key=True),
    Column("split", String(32), primary_key=True),
    Column("id", String(SHORT_TEXT), primary_key=True),
    Column("payload", WrittenJson, nullable=False),
    Column("created_at", Time, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    *columns(SessionRecord),
    ForeignKeyConstraint(
        ["task_suite", "task_split", "task_id"], ["tasks.suite", "tasks.split", "tasks.id"]
    ),
    Index(None, "run_id", "created_at"),
    Index(None, "group_id"),
    Index(None, "created_at"),
    Index(None, "sealed_at"),
    Index(
        "ix_sessions_siblings",
        "origin_session_id",
        sqlite_where=text("origin_session_id IS NOT NULL"),
        postgresql_where=text("origin_session_id IS NOT NULL"),
    ),
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
    *columns(BegunFacts, WrittenFacts, LineageState, EndedFacts, DerivedFacts, DecidedFacts),
    Index(None, "session_id", "started_at"),
    Index(
        "ix_calls_open",
        "writer_id",
        sqlite_where=text("status = 'open'"),
        postgresql_where=text("status = 'open'"),
    ),
)
"""The calls, as store/call.py declares them. The call's own messages follow the reply
``base_choice`` of ``base_call_id``."""

call_messages = Table(
    "call_messages",
    metadata,
    Column("call_id", String(64), ForeignKey("calls.id"), primary_key=True),
    Column("choice", Integer, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("role", String(16), nullable=False),
    Column("content", Text),
    Column("content_json", WrittenJson),
    Column("reasoning", Text),
    Column("tool_calls", WrittenJson),
    Column("tool_call_id", Text),
    Column("name", Text),
)
"""The messages, each stored once with the call that brought it. ``choice`` is -1 for messages of
the call's request, else the choice whose reply the message is. ``position`` counts from the start
of the whole conversation. Content that is not plain text (a list of parts, or text with a NUL
character, which no column of text holds) is in ``content_json``, and ``content`` is NULL then.
``tool_calls`` is a list of objects with ``id``, ``name`` and ``arguments``."""

call_kinds = Table(
    "call_kinds",
    metadata,
    Column("call_id", String(64), ForeignKey("calls.id"), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("role", Text),
    Column("break_reason", String(32)),
)
"""The verdict on each call: its kind and role, and the reason of its break. It is written when the
session is sealed, when a person sets a kind, and by ``bridle audit``."""

tool_sets = Table(
    "tool_sets",
    metadata,
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("id", LargeBinary(16), primary_key=True),
    Column("definitions", WrittenJson, nullable=False),
)
"""The sets of tools that the calls of a session had, each stored once (``calls.tools_id``)."""

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
    Column("versions", PlainJson, nullable=False),
    Column("kept", LargeBinary),
    Column("routed_experts", LargeBinary),
    Column("checksum", LargeBinary(8), nullable=False),
)
"""The spans of token trees. ``choice`` is -1 for the observed tokens of a call. The parent is a
span of ``parent_call_id``, or of the same call if that is NULL; there is none if ``parent_choice``
is NULL. ``kept`` has the ids that each token was drawn from, and ``routed_experts`` the experts
that each was predicted by, where the engine reported them."""

bodies = Table(
    "bodies",
    metadata,
    Column("call_id", String(64), ForeignKey("calls.id"), primary_key=True),
    Column("part", String(8), primary_key=True),
    Column("base_call_id", String(64)),
    Column("prefix", Integer, nullable=False),
    Column("suffix", Integer, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""The exact bytes of a call's ``request`` and ``response`` (``store/encoding/bodies.py``)."""

vocabularies = Table(
    "vocabularies",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("data", LargeBinary, nullable=False),
)
"""The bytes that each token id stands for, by their SHA-256 (``store/encoding/vocabulary.py``).
They are few: one for each tokenizer that a proxy was ever given."""

rewards = Table(
    "rewards",
    metadata,
    Column("id", String(64), primary_key=True),
    *columns(Reward),
    Index(None, "session_id"),
)
"""The rewards. ``kind`` is ``score``, ``success`` or ``finding``; only a finding has a ``mode``
(``store/reward.py``)."""

leases = Table(
    "leases",
    metadata,
    Column("consumer", String(64), primary_key=True),
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("lease_id", String(64), nullable=False),
    Column("until", Time),
    Index(None, "session_id"),
)
"""The sessions that a consumer of the feed holds; ``until`` is NULL once it has acknowledged them
(``store/operations/leases.py``)."""

token_fates = Table(
    "token_fates",
    metadata,
    Column("session_id", String(64), ForeignKey("sessions.id"), primary_key=True),
    Column("run_id", String(64), primary_key=True),
    Column("fate", String(16), primary_key=True),
    Column("reason", String(64), primary_key=True),
    Column("tokens", BigInteger, nullable=False),
    Column("step", Integer),
    Column("version", BigInteger),
    Column("at", Time),
    Index(None, "run_id", "session_id"),
)
"""The fates of a session's sampled tokens. Rows with a ``run_id`` are a training run's account of
the session, written once the step is durable: ``trained`` (the reason is empty, or ``recording``
for a session of another run that was trained beside the run's own), ``masked`` or
``dropped``, the step from 0 and the policy version after it. Rows with an empty ``run_id`` are the
account by the rules of the session's run, which ``bridle audit`` writes; they have ``trainable`` in
place of ``trained``. The view ``token_accounts`` has the one account that counts
(``store/schema/accounts.py``)."""

trained_spans = Table("trained_spans", metadata, *columns(TrainedSpan))
"""The trainer's scores of sampled tokens, a row for each span that was trained, of the last step
that trained it. A step whose session was replayed from an earlier step leaves that step's row."""

policies = Table(
    "policies",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("name", String(SHORT_TEXT), primary_key=True),
    Column("version", BigInteger, primary_key=True),
    Column("path", Text),
    Column("digest", String(64)),
    Column("verified", Boolean, nullable=False),
    Column("logprob_gap", Float(53)),
    Column("published_at", Time, nullable=False),
)

served = Table(
    "served",
    metadata,
    Column("deployment", String(512), primary_key=True),
    Column("engine", String(512), primary_key=True),
    Column("policy", String(SHORT_TEXT), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("published", BigInteger, nullable=False),
    Column("reported_at", Time, nullable=False),
    Column("weights_fingerprint", Text),
)
"""The engines of a deployment, each with the policy version that it was last reported to serve.
An engine that serves several policies, as LoRA adapters on one model, has a row for each.
``published`` is the revision of that report. ``weights_fingerprint`` is the engine's own
fingerprint of its weights at that time."""

metrics = Table(
    "metrics",
    metadata,
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("name", String(SHORT_TEXT), primary_key=True),
    Column("value", Float(53)),
    Column("at", Time, nullable=False),
)
"""The numbers of training runs. ``value`` is NULL where it was not a number, because SQLite has no
NaN."""
