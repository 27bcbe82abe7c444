"""A task's id is its own within its suite and split: two suites may both count from one.

Downwards, where one id is left for all of them, the task that was added last stays.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_KEY = ["suite", "split", "id"]
_NAMED = ["task_suite", "task_split", "task_id"]
_BY_ID = "fk_sessions_task_id_tasks"
_BY_KEY = "fk_sessions_task_suite_task_split_task_id_tasks"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("task_suite", sa.String(length=128), nullable=True))
    op.add_column("sessions", sa.Column("task_split", sa.String(length=32), nullable=True))
    op.execute(
        "UPDATE sessions SET"
        " task_suite = (SELECT suite FROM tasks WHERE tasks.id = sessions.task_id),"
        " task_split = (SELECT split FROM tasks WHERE tasks.id = sessions.task_id)"
    )
    _drop_foreign_key(_BY_ID)
    _change_key(_KEY)
    _add_foreign_key(_BY_KEY, _NAMED, _KEY)


def downgrade() -> None:
    _drop_foreign_key(_BY_KEY)
    op.execute(
        "DELETE FROM tasks WHERE EXISTS (SELECT 1 FROM tasks AS other WHERE other.id = tasks.id"
        " AND (other.created_at, other.suite, other.split)"
        " > (tasks.created_at, tasks.suite, tasks.split))"
    )
    _change_key(["id"])
    _add_foreign_key(_BY_ID, ["task_id"], ["id"])
    for name in ("task_split", "task_suite"):
        op.drop_column("sessions", name)


def _drop_foreign_key(name: str) -> None:
    with op.batch_alter_table("sessions") as sessions:
        sessions.drop_constraint(name, type_="foreignkey")


def _add_foreign_key(name: str, columns: list[str], of_tasks: list[str]) -> None:
    with op.batch_alter_table("sessions") as sessions:
        sessions.create_foreign_key(name, "tasks", columns, of_tasks)


def _change_key(columns: list[str]) -> None:
    with op.batch_alter_table("tasks") as tasks:
        tasks.drop_constraint("pk_tasks", type_="primary")
        tasks.create_primary_key("pk_tasks", columns)
