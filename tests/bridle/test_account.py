"""One account of tokens: report, audit, viewer and SQL of a run have the same figures."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bridle.store.reading.queries import Reader
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source

pytestmark = pytest.mark.usefixtures("warm_start")


def bridle(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bridle", *arguments], capture_output=True, text=True, check=False
    )


def audited(store: str, *more: str) -> dict[str, int]:
    done = bridle("audit", "--store", store, "--json", *more)
    assert done.returncode == 0, done.stdout
    table = json.loads(done.stdout)
    found = {"captured": table["captured"]}
    found |= {fate: table[fate] for fate in ("trained", "trainable") if table[fate]}
    for fate in ("masked", "dropped"):
        found |= {f"{fate}: {reason}": tokens for reason, tokens in table[fate].items()}
    return found


def seen(store: str, path: str) -> dict[str, int]:
    """The table of an account on a page of the viewer."""
    import re

    with Reader(store) as reader:
        page = TestClient(viewer_app(Source(reader, store, str))).get(path).text
    table = page[page.index('<table class="account">') :]
    rows = re.findall(
        r'<th scope="row">(?:<a [^>]*>)?([^<]+)(?:</a>)?</th><td class="n">([\d,]+)</td>',
        table[: table.index("</table>")],
    )
    counted = {name.replace(" ", "_").replace(":_", ": "): n for name, n in rows}
    return {name: int(n.replace(",", "")) for name, n in counted.items() if n != "0"}


def in_sql(store: str, query: str) -> Any:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute(query).fetchall()


def by_label(rows: list[tuple[str, str, int]]) -> dict[str, int]:
    return {f"{fate}: {reason}" if reason else fate: tokens for fate, reason, tokens in rows}


def test_report_audit_viewer_and_sql_have_one_account_of_a_run(
    training_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = training_arguments()
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"id": "h", "prompt": "Question 9?", "payload": {}}) + "\n")
    evaluation = ("--evaluate-every", "1", "--set", f"evaluation.source={held_out}")
    store = str(tmp_path / "out" / "bridle.db")
    before = bridle(*arguments, *evaluation, "--steps", "1")
    assert before.returncode == 0, before.stdout + before.stderr
    done = bridle(*arguments, *evaluation, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    account = {label: tokens for label, tokens in report["tokens"].items() if tokens}
    whole = {"captured": report["tokens_captured"], **account}
    (sampled,) = in_sql(store, "SELECT sum(sampled_tokens) FROM calls")[0]
    assert whole["captured"] == sampled == sum(account.values())
    assert whole["trained"] > 0
    assert whole["dropped: evaluation"] > 0
    assert audited(store) == whole
    assert (
        audited(store, "--run", in_sql(store, "SELECT id FROM runs WHERE kind='train'")[0][0])
        == whole
    )
    assert seen(store, "/audit") == whole
    run = in_sql(store, "SELECT id FROM runs WHERE kind = 'train'")[0][0]
    assert seen(store, f"/runs/{run}") == whole
    grouped = "SELECT fate, reason, sum(tokens) FROM {} GROUP BY fate, reason"
    assert by_label(in_sql(store, grouped.format("token_accounts"))) == account
    trained = by_label(in_sql(store, grouped.format("token_fates")))
    assert trained == {k: v for k, v in account.items() if k != "dropped: evaluation"}
    assert f"of {sampled} tokens sampled {whole['trained']} were trained" in done.stdout

    pages: Counter[str] = Counter()
    for (session,) in in_sql(store, "SELECT id FROM sessions"):
        pages.update(seen(store, f"/sessions/{session}/audit"))
    assert dict(pages) == whole

    ended = in_sql(store, "SELECT kind, status, ended_at IS NOT NULL FROM runs ORDER BY kind")
    assert ended == [("eval", "completed", 1), ("train", "completed", 1)]
    assert [one["status"] for one in report["attempts"]] == ["completed", "completed"]
    spent = [one["minutes"] for one in report["attempts"]]
    assert report["minutes"] == pytest.approx(sum(spent))
    assert report["last_attempt_minutes"] == spent[-1] < report["minutes"]
    assert sum(one["tokens"] for one in report["attempts"]) == sampled
    assert "in 2 attempts" in done.stdout
