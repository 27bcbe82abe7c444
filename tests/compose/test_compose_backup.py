"""A deployment of which nothing but a backup is left, as docs/deploy.md restores it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.processes import until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

BACKUP = "/data/backups/monday.db"


def completed(compose: Any) -> set[str]:
    """Ids of the recorded sessions that came to their end."""
    listed = compose("exec", "-T", "proxy", "bridle", "sessions", "--limit", "1000", "--json")
    return {each["id"] for each in json.loads(listed) if each["outcome"] == "completed"}


@pytest.mark.sampled(0)
def test_a_backup_under_load_is_all_that_a_new_deployment_needs(
    compose: Any, tmp_path: Path
) -> None:
    endless = replace(compose, environment={**compose.environment, "BRIDLE_STEPS": "500"})
    endless("up", "--detach")
    until(lambda: len(completed(compose)) >= 12, 300, lambda: compose("logs", "--tail", "40"))
    before = completed(compose)
    compose("exec", "-T", "proxy", "bridle", "backup", BACKUP)
    assert compose.state("trainer")["State"] == "running", "it was taken under load"
    compose("cp", f"proxy:{BACKUP}", str(tmp_path / "monday.db"))
    compose("down", "--volumes", "--timeout", "5")

    backup = (tmp_path / "monday.db").read_bytes()
    restore = "cat >/data/monday.db && bridle import-db /data/monday.db"
    compose("run", "--rm", "-T", "init", "sh", "-c", restore, given=backup)
    compose("up", "--detach", "proxy")
    restored = completed(compose)
    assert restored >= before
    compose("exec", "-T", "proxy", "bridle", "audit")

    # The weights are gone: the recorded sessions are trained once more, and then it goes on.
    steps = len(restored) // compose.sessions_a_step + 2
    longer = replace(compose, environment={**compose.environment, "BRIDLE_STEPS": str(steps)})
    longer("up", "--detach")
    log = longer.until_trained(900)
    after = completed(compose)
    assert after >= restored, log
    assert len(after) == steps * compose.sessions_a_step, log
    compose("exec", "-T", "proxy", "bridle", "audit")
