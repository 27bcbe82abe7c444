"""One account of tokens: report, audit, viewer and SQL of a run have the same figures."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from bridle.diagnosis.facts import read_facts
from bridle.reconstruct.accounts import account_lines, token_account
from bridle.reconstruct.audit import audit, audit_session
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.rewards import CountedRewards
from bridle.reconstruct.samples.builders import BUILDER_VERSION
from bridle.reconstruct.samples.rules import DEFAULT_RULES
from bridle.reconstruct.session import LoadedSession
from bridle.run.feed import trajectory
from bridle.run.report import token_figures
from bridle.store.reading.accounts import stored_account, written_accounts
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import CallKind, CallStatus, RunRecord, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.store.schema.accounts import UNCOUNTED, Fate
from bridle.store.schema.database import migrate
from bridle.store.trained import SessionFates
from bridle.store.writing.writer import Writer
from bridle.viewer.app import viewer_app
from bridle.viewer.rendering import Source
from support.processes import bridle

pytestmark = pytest.mark.usefixtures("warm_start")


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
    with Reader(store) as reader:
        page = TestClient(viewer_app(Source(reader, store))).get(path).text
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
    evaluation = ("--set", "evaluation.every=1", "--set", f"evaluation.source={held_out}")
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


EXCLUDED: dict[str, dict[str, Any]] = {
    "quarantined": {"status": CallStatus.QUARANTINED},
    "kind_side": {"kind": CallKind.SIDE},
    "kind_compaction": {"kind": CallKind.COMPACTION},
    "replayed": {},
}
"""The fields of a call that is not trained, by the reason."""


class RandomStore:
    """A store of runs of every kind, whose sessions training has taken or not."""

    def __init__(self, path: Path, calls: Any, seed: int) -> None:
        self.url, self._calls = str(path), calls
        self._random = np.random.default_rng(seed)
        migrate(self.url)
        with Writer(self.url) as writer:
            self._fill(writer)
        with Reader(self.url) as reader:
            for session in reader.sessions():
                if self._random.random() < 0.2:
                    audit_session(reader, session.id)

    def _fill(self, writer: Writer) -> None:
        runs = [("a", "train"), ("a.eval", "eval"), ("b", "train"), ("c", "rollout"), ("d", "eval")]
        for run, kind in runs:
            writer.add_sync(RunRecord(run, kind, 1.0))
        taken: list[SessionFates] = []
        for _ in range(int(self._random.integers(1, 14))):
            run = self._random.choice([None, *(name for name, _ in runs)])
            session = self._calls.session(run_id=run, sealed_at=time.time())
            writer.add_sync(session)
            trainable, excluded = self._record(writer, session)
            for trainer in ("a", "b"):
                if self._random.random() < 0.5:
                    tokens = self._fates(trainable, excluded)
                    at = time.time() + self._random.random()
                    taken.append(SessionFates(session.id, trainer, tokens, 0, 1, at))
            if self._random.random() < 0.2:
                self._record(writer, session)
        writer.add_sync(*taken)
        writer.add_sync(*taken[:3])

    def _record(self, writer: Writer, session: SessionRecord) -> tuple[int, Counter[str]]:
        """Record more calls of a session: turns, summaries, side calls, replayed and cut ones.

        A call may continue the one before it, whose tokens it holds or has edited. Return the
        trainable tokens, and the others by reason.
        """
        trainable, excluded, before = 0, Counter[str](), None
        for _ in range(int(self._random.integers(0, 5))):
            reason = str(self._random.choice(["", "", *EXCLUDED]))
            sampled = list(range(int(self._random.integers(0, 9))))
            more: dict[str, Any] = {"replayed_call_id": "call_x"} if reason == "replayed" else {}
            sampled = [] if more else sampled
            begun = self._calls.begun(session, parent_call_id=before, **more)
            writer.begin_call(begun)
            prompt = [1, 2] if before is None else [1, int(self._random.integers(2, 4)), 3]
            writer.end_call_sync(
                self._calls.ended(begun, prompt, sampled, **EXCLUDED.get(reason, {}))
            )
            if reason:
                excluded[reason] += len(sampled)
            else:
                trainable += len(sampled)
                before = begun.id
        return trainable, excluded

    def _fates(self, trainable: int, excluded: Counter[str]) -> dict[tuple[str, str], int]:
        """Draw the fates of a session's tokens in a step: masked ones, and parts of the rest."""
        stale, trained = sorted(self._random.integers(0, trainable + 1, 2))
        reason = str(self._random.choice(["zero_variance", "stale", "a_filter"]))
        fates = {
            ("trained", ""): int(trained - stale),
            ("masked", "no_baseline"): int(stale),
            ("dropped", reason): int(trainable - trained),
            **{("dropped", why): tokens for why, tokens in excluded.items()},
        }
        return {fate: tokens for fate, tokens in fates.items() if tokens}


@pytest.mark.parametrize("seed", range(12))
def test_report_audit_doctor_viewer_feed_and_sql_agree_to_the_token_on_any_store(
    tmp_path: Path, calls: Any, seed: int
) -> None:
    store = RandomStore(tmp_path / "bridle.db", calls, seed).url
    with Reader(store) as reader:
        for run in (None, "a", "b", "c", "d"):
            audits = list(audit(reader, DEFAULT_RULES, run=run))
            assert not [violation for one in audits for violation in one.violations]
            total: Counter[Fate] = sum((Counter(dict(one.fates)) for one in audits), Counter())
            account = token_account(reader, SessionFilter(run=run))
            assert account.fates == dict(total)
            assert account.captured == total.total()
            captured = [one.conservation.captured for one in audits]
            assert account.captured == sum(captured)
            record = None if run is None else reader.run(run)
            examined = read_facts(reader, CountedRewards(reader).number, run=record).account
            assert examined == stored_account(reader, SessionFilter(run=run))
            page = seen(store, "/audit" + (f"?run={run}" if run else ""))
            table = {"captured": account.captured} | {
                line.label: line.tokens for line in account_lines(total)
            }
            assert page == {label: tokens for label, tokens in table.items() if tokens}
            if run is not None:
                assert seen(store, f"/runs/{run}") == page
                figures = token_figures(reader, run)
                assert figures["tokens"] == {k: n for k, n in table.items() if k != "captured"}
                assert figures["tokens_captured"] == account.captured
            uncounted = stored_account(reader, SessionFilter(run=run)).of("uncounted")
            left = {
                session: written
                for session, written in written_accounts(reader, SessionFilter(run=run)).items()
                if written.uncounted
            }
            assert uncounted == sum(
                one.conservation.captured for one in audits if one.session_id in left
            )
        rows = in_sql(store, "SELECT session_id, fate, reason, tokens FROM token_accounts")
        audits = {one.session_id: one for one in audit(reader, DEFAULT_RULES)}
        for session in LoadedSession.stream(reader, reader.sessions()):
            fed = trajectory(episode_of(session))["tokens"]
            table = audits[session.id].conservation
            assert fed == {
                "captured": table.captured,
                "trainable": table.trained,
                "masked": table.masked,
                "dropped": table.dropped,
            }
    by_session: dict[str, Counter[Fate]] = {}
    for session, fate, reason, tokens in rows:
        by_session.setdefault(session, Counter())[Fate(fate, reason)] += tokens
    with Reader(store) as reader:
        for one in audit(reader):
            sql = by_session.get(one.session_id, Counter())
            assert sql.total() == sum(one.fates.values())
            assert sql in (Counter(dict(one.fates)), Counter({UNCOUNTED: sql.total()}))


@pytest.mark.damages_store
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("UPDATE token_fates SET tokens = tokens + 1", "fates_differ"),
        ("UPDATE token_fates SET tokens = tokens - 1 WHERE fate = 'trained'", "fates_differ"),
        ("DELETE FROM token_fates WHERE fate = 'trained'", "fates_differ"),
        ("UPDATE token_fates SET fate = 'eaten' WHERE fate = 'trained'", "fates_unknown"),
        (
            "UPDATE token_fates SET tokens = CASE fate WHEN 'trained' THEN 5 ELSE 0 END",
            "trained_against_rules",
        ),
    ],
)
def test_the_audit_finds_an_account_that_the_record_contradicts(
    tmp_path: Path, calls: Any, change: str, rule: str
) -> None:
    store = str(tmp_path / "bridle.db")
    migrate(store)
    rules = {"builder_version": BUILDER_VERSION, "rules": DEFAULT_RULES.as_data()}
    with Writer(store) as writer:
        writer.add_sync(RunRecord("a", "train", 1.0, config={"samples": rules}))
        session = calls.session(run_id="a")
        writer.add_sync(session)
        for status in (CallStatus.COMPLETE, CallStatus.QUARANTINED):
            begun = calls.begun(session)
            writer.begin_call(begun)
            writer.end_call_sync(
                calls.ended(begun, [1], [2, 3] if status == "complete" else [4] * 3, status=status)
            )
        tokens = {("trained", ""): 2, ("dropped", "quarantined"): 3}
        writer.add_sync(SessionFates(session.id, "a", tokens, 0, 1, time.time() + 1))
    with Reader(store) as reader:
        (before,) = audit(reader)
        assert before.clean
        with closing(sqlite3.connect(store)) as connection, connection:
            connection.execute(change)
        (after,) = audit(reader)
    assert rule in {violation.rule for violation in after.violations}
    assert bridle("audit", "--store", store).returncode == 1


def test_a_store_that_nothing_has_trained_on_has_trainable_tokens(
    tmp_path: Path, calls: Any
) -> None:
    store = str(tmp_path / "bridle.db")
    migrate(store)
    with Writer(store) as writer:
        session = calls.session()
        writer.add_sync(session)
        begun = calls.begun(session)
        writer.begin_call(begun)
        writer.end_call_sync(calls.ended(begun, [1], [2, 3]))
    assert audited(store) == seen(store, "/audit") == {"captured": 2, "trainable": 2}
    printed = bridle("audit", "--store", store).stdout
    assert "trained" not in printed
    done = bridle("export", str(tmp_path / "x.parquet"), "--store", store)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "x.parquet.card.json").read_text())
    assert card["tokens"] == {"captured": 2, "trainable": 2}
    assert card["counts"]["trainable_tokens"] == 2


def test_training_on_recorded_sessions_and_fine_tuning_account_for_them(
    training_arguments: Callable[..., list[str]], tmp_path: Path, calls: Any
) -> None:
    """Each is a run of its own; the session's account is that of the one which took it last."""
    training_arguments()
    store, policy = str(tmp_path / "bridle.db"), str(tmp_path / "policy")
    migrate(store)
    with Writer(store) as writer:
        writer.add_sync(RunRecord("r", "rollout", 1.0))
        for number, rewards in enumerate(([0.0, 1.0], [1.0, 1.0])):
            for reward in rewards:
                session = calls.session(run_id="r", group_id=f"g{number}", sealed_at=time.time())
                writer.add_sync(session)
                begun = calls.begun(session)
                writer.begin_call(begun)
                writer.end_call_sync(calls.ended(begun, [1, 2], [3, 4, 5], version=0))
                source = RewardSource.VERIFIER
                writer.add_sync(Reward(session.id, "reward", reward, 1.0, source=source))
    recorded = ("train", "--from-store", store, "--policy", policy)
    done = bridle(
        *recorded,
        "--set",
        "recordings.other_policy=true",
        "--set",
        "recordings.run=r",
        "--set",
        "groups.per_step=2",
        "--out",
        str(tmp_path / "out"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    taken = {"captured": 12, "trained": 6, "dropped: zero_variance": 6}
    assert audited(store) == audited(store, "--run", "train:out") == taken
    assert seen(store, "/runs/train%3Aout") == seen(store, "/runs/r") == taken
    assert (
        "of 12 tokens sampled 6 were trained, 0 masked, 6 dropped (6 zero variance)" in done.stdout
    )

    tuned = bridle(
        *("sft", "--policy", policy, "--store", store, "--out", str(tmp_path / "tuned")),
        *("--where", "group_id = 'g1'", "--set", "epochs=3"),
    )
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    assert audited(store) == {"captured": 12, "trained": 12}
    assert audited(store, "--run", "train:out") == taken, "its own account stays"
    with Reader(store) as reader:
        (run,) = reader.runs("sft")
    assert (run.name, run.status) == ("tuned", "completed")
    assert audited(store, "--run", run.id) == {"captured": 6, "trained": 6}
    refused = bridle(
        "sft",
        "--policy",
        policy,
        "--store",
        store,
        "--out",
        str(tmp_path / "more"),
        "--where",
        "group_id = 'none'",
    )
    assert refused.returncode != 0
    with Reader(store) as reader:
        states = {one.name: one.status for one in reader.runs("sft")}
    assert states == {"tuned": "completed", "more": "failed"}
    assert audited(store) == {"captured": 12, "trained": 12}
