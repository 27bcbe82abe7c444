"""Each call's sampler, made from the sampling parameters of calls that are there already.

Release 0.2.0 had engines report logprobs before temperature and truncation, and take the policy's
own distribution for what a request leaves out.
"""

import orjson
import sqlalchemy as sa
from alembic import op

from bridle.store.schema.columns import PlainJson

revision = "0202"
down_revision = "0201"

_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_AT_ONCE = 1000


def upgrade() -> None:
    with op.batch_alter_table("calls") as calls:
        calls.add_column(sa.Column("sampler", PlainJson))
    connection = op.get_bind()
    last = ""
    while rows := connection.execute(
        sa.text(
            "SELECT id, CAST(sampling AS TEXT), CAST(notes AS TEXT) FROM calls"
            " WHERE id > :last AND sampled_tokens > 0 ORDER BY id LIMIT :limit"
        ),
        {"last": last, "limit": _AT_ONCE},
    ).all():
        connection.execute(
            sa.text("UPDATE calls SET sampler = CAST(:sampler AS JSON) WHERE id = :id")
            if connection.dialect.name == "postgresql"
            else sa.text("UPDATE calls SET sampler = :sampler WHERE id = :id"),
            [{"id": row[0], "sampler": _sampler(row[1], row[2])} for row in rows],
        )
        last = rows[-1][0]
    _rename_rule(connection)


def _rename_rule(connection: sa.Connection) -> None:
    """Replace ``constrained`` by ``samplers`` in the rules of stored samples."""
    samples = sa.table("samples", sa.column("id", sa.String), sa.column("rules", sa.JSON))
    for identifier, rules in connection.execute(sa.select(samples.c.id, samples.c.rules)).all():
        trained = rules.pop("constrained", True)
        rules["samplers"] = "any" if trained else "scored"
        connection.execute(sa.update(samples).where(samples.c.id == identifier).values(rules=rules))


def _sampler(sampling: str | None, notes: str | None) -> str:
    asked = orjson.loads(sampling or "{}")
    found = {name: asked[name] for name in _PARAMETERS if asked.get(name) is not None}
    for note in orjson.loads(notes or "[]"):
        if note["name"] == "constrained_by_grammar":
            found["grammar"] = note["detail"] or "unknown"
    return orjson.dumps({"logprobs": "raw", **found}).decode()
