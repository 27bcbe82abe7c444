"""The gates of a deployment, in both databases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import update

from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.operations.gates import Gates, StaleVersion
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord
from bridle.store.schema.database import transaction
from bridle.store.schema.tables import writers
from bridle.store.writing.writer import Writer

ENGINES = {"policy": ["http://one", "http://two"], "planner": ["http://three"]}


@contextmanager
def member(url: str, deployment: str = "one", engines: Any = None) -> Iterator[tuple[Gates, str]]:
    """A process that has joined, and the id of its row."""
    with Writer(url) as writer, Reader(url) as reader:
        gates = Gates(reader.engine, deployment)
        gates.join(writer.id, engines or ENGINES)
        yield gates, writer.id
        gates.close()


def versions(gates: Gates) -> dict[str, int]:
    rows = gates.read()
    return {url: one.version for own in rows.engines.values() for url, one in own.items()}


def test_a_change_is_a_revision_and_a_look_without_one_costs_no_rows(url: str) -> None:
    with member(url) as (gates, _):
        rows = gates.read()
        assert gates.revision() == rows.revision
        revision = gates.publish("policy", 3, "tuned", None, back=False)
        assert gates.revision() > rows.revision
        changed = gates.read()
        assert changed.revision == revision > rows.revision
        assert (changed.gates["policy"].version, changed.gates["policy"].model) == (3, "tuned")
        assert changed.gates["planner"] == rows.gates["planner"]
        assert versions(gates) == {"http://one": 3, "http://two": 3, "http://three": 0}


def test_changes_from_several_threads_get_a_revision_each(url: str) -> None:
    with member(url) as (gates, _), ThreadPoolExecutor(4) as threads:
        revisions = list(threads.map(lambda n: gates.set_paused(n % 2 == 0), range(20)))
        assert len(set(revisions)) == 20
        rows = gates.read()
        assert rows.revision == max(revisions)


def test_an_older_version_is_refused_unless_it_is_meant(url: str) -> None:
    with member(url) as (gates, _):
        gates.publish("policy", 5, None, None, back=False)
        with pytest.raises(StaleVersion):
            gates.publish("policy", 4, None, None, back=False)
        gates.publish("policy", 2, None, None, back=True)
        assert versions(gates)["http://one"] == 2


def test_one_engine_takes_the_policy_along_only_to_a_newer_version(url: str) -> None:
    with member(url) as (gates, _):
        gates.publish("policy", 5, None, "http://one", back=False)
        gates.publish("policy", 4, None, "http://two", back=False)
        rows = gates.read()
        assert rows.gates["policy"].version == 5
        assert versions(gates) == {"http://one": 5, "http://two": 4, "http://three": 0}
        with pytest.raises(NotFound):
            gates.publish("policy", 6, None, "http://three", back=False)


def test_a_fingerprint_belongs_to_the_publish_that_it_was_read_for(url: str) -> None:
    with member(url) as (gates, _):
        overtaken = gates.publish("policy", 2, None, None, back=False)
        latest = gates.publish("policy", 2, None, None, back=False)
        gates.set_fingerprints("policy", overtaken, {"http://one": "of the first"})
        gates.set_fingerprints("policy", latest, {"http://two": "of the last"})
        rows = gates.read()
        assert rows.engines["policy"]["http://one"].weights_fingerprint is None
        assert rows.engines["policy"]["http://two"].weights_fingerprint == "of the last"


def test_an_engine_of_two_policies_has_a_version_of_each(url: str) -> None:
    shared = {"policy": ["http://one"], "planner": ["http://one", "http://two"]}
    with member(url, engines=shared) as (gates, _):
        revision = gates.publish("planner", 2, "planner-v2", None, back=False)
        gates.set_fingerprints("planner", revision, {"http://one": "of the planner"})
        own = gates.read().engines
        assert own["policy"]["http://one"].version == 0
        assert own["policy"]["http://one"].weights_fingerprint is None
        assert own["planner"]["http://one"].version == 2
        assert own["planner"]["http://one"].weights_fingerprint == "of the planner"
        gates.remove_engine("planner", "http://one")
        assert {name: set(urls) for name, urls in gates.read().engines.items()} == {
            "policy": {"http://one"},
            "planner": {"http://two"},
        }
    with member(url, engines={"policy": ["http://one"]}) as (gates, _):
        assert set(gates.read().engines) == {"policy"}


def test_engines_come_and_go_but_the_last_one_stays(url: str) -> None:
    with member(url) as (gates, _):
        gates.add_engine("policy", "http://four", 3)
        gates.add_engine("policy", "http://four", 7)
        assert versions(gates)["http://four"] == 3
        with pytest.raises(ValueError, match="serves the policy planner"):
            gates.add_engine("policy", "http://three", 3)
        for known in ("http://one", "http://two"):
            gates.remove_engine("policy", known)
        with pytest.raises(ValueError, match="the last engine"):
            gates.remove_engine("policy", "http://four")
        with pytest.raises(NotFound):
            gates.remove_engine("policy", "http://one")


def test_members_are_the_live_processes_of_one_deployment(url: str) -> None:
    with member(url) as (gates, own), member(url, "another"):
        assert gates.others(own) == []
        with member(url) as (other, its):
            other.report(its, 7, {"running": 2})
            (found,) = gates.others(own)
            assert (found.seen, found.report) == (7, {"running": 2})
            with transaction(gates._engine) as connection:
                connection.execute(
                    update(writers).where(writers.c.id == its).values(process="another")
                )
            assert gates.others(own) == []


def test_a_pause_and_other_engines_end_with_the_last_process(url: str) -> None:
    with member(url) as (gates, _), member(url, "another") as (stranger, _):
        gates.publish("policy", 3, "tuned", None, back=False)
        gates.add_engine("policy", "http://four", 3)
        gates.remove_engine("policy", "http://one")
        gates.set_paused(True)
        stranger.set_paused(True)
        with member(url, engines={"critic": ["http://five"]}) as (later, _):
            rows = later.read()
            assert all(gate.paused for gate in rows.gates.values())
            assert set(versions(later)) == {
                *("http://two", "http://three", "http://four", "http://five")
            }
    with member(url) as (gates, _):
        rows = gates.read()
        assert not any(gate.paused for gate in rows.gates.values())
        assert (rows.gates["policy"].version, rows.gates["policy"].model) == (3, "tuned")
        assert versions(gates) == {"http://one": 0, "http://two": 3, "http://three": 0}


async def test_a_seal_is_read_at_once(url: str) -> None:
    with Writer(url) as writer, Reader(url) as reader:
        gates = Gates(reader.engine, "one")
        await writer.add(SessionRecord(id="ses_1", created_at=time.time()))
        assert not gates.is_sealed("ses_1")
        await writer.seal_session("ses_1", "done", time.time())
        assert gates.is_sealed("ses_1")
        assert not gates.is_sealed("ses_2")
        gates.close()


async def test_a_name_is_known_once_its_session_is_stored(url: str) -> None:
    with Writer(url) as writer, Reader(url) as reader:
        gates = Gates(reader.engine, "one")
        assert not gates.is_named("agent-1")
        await writer.add(SessionRecord(id="ses_1", name="agent-1", created_at=time.time()))
        assert gates.is_named("agent-1")
        assert not gates.is_named("ses_1")
        if gates.remote:
            assert gates.named_among(["agent-1", "agent-2"]) == {"agent-1"}
        gates.close()


def end_connections(url: str) -> None:
    """End all connections of others to PostgreSQL, and wait until they are gone."""
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )


def test_a_connection_that_is_lost_is_opened_again(url: str) -> None:
    with member(url) as (gates, _):
        assert not gates.is_sealed("ses_1")
        if not gates.remote:
            gates._driver.close()
            with pytest.raises(StoreUnavailable):
                gates.is_sealed("ses_1")
        else:
            end_connections(url)
        assert not gates.is_sealed("ses_1")


def test_an_event_loop_may_ask_only_an_open_connection_that_waits_for_no_lock(url: str) -> None:
    with member(url) as (gates, _):
        assert not gates.ready, "to connect may take long"
        gates.revision()
        assert gates.ready != url.startswith("postgresql")
        if gates.ready:
            assert gates._driver.execute("PRAGMA busy_timeout").fetchone() == (0,)
        gates.close()
        assert not gates.ready
