"""The control log of a deployment, in both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bridle.store.operations.control import ControlLog
from bridle.store.reading.queries import Reader
from bridle.store.writing.writer import Writer


def test_changes_from_several_threads_are_read_in_one_order(url: str) -> None:
    with Writer(url) as writer, Reader(url) as reader:
        log = ControlLog(reader.engine, "one")
        log.join(writer.id)
        with ThreadPoolExecutor(4) as threads:
            revisions = list(threads.map(lambda n: log.append({"n": n}), range(20)))
        found = log.since(0)
        assert [revision for revision, _ in found] == sorted(revisions)
        assert {change["n"]: revision for revision, change in found} == dict(enumerate(revisions))
        assert log.since(found[9][0]) == found[10:]


def test_a_revision_is_not_used_again_after_its_change_is_removed(url: str) -> None:
    with Writer(url) as writer, Reader(url) as reader:
        log = ControlLog(reader.engine, "one")
        log.join(writer.id)
        last = log.append({})
        log.remove(last)
        assert log.append({}) > last


def test_members_are_the_live_processes_of_one_deployment(url: str) -> None:
    with Reader(url) as reader, Writer(url) as one, Writer(url) as other, Writer(url) as third:
        first, second = ControlLog(reader.engine, "first"), ControlLog(reader.engine, "second")
        first.join(one.id)
        first.join(other.id)
        second.join(third.id)
        report: dict[str, Any] = {"running": 2}
        first.acknowledge(other.id, 7, report)
        (member,) = first.others(one.id)
        assert (member.id, member.revision, member.report) == (other.id, 7, report)
        other.close()
        assert first.others(one.id) == []


def test_the_log_begins_anew_with_the_first_process_of_its_deployment(url: str) -> None:
    with Reader(url) as reader:
        log, stranger = ControlLog(reader.engine, "one"), ControlLog(reader.engine, "another")
        with Writer(url) as first, Writer(url) as second:
            log.join(first.id)
            stranger.append({"n": 0})
            log.append({"n": 1})
            log.join(second.id)
            assert [change for _, change in log.since(0)] == [{"n": 1}]
        with Writer(url) as later:
            log.join(later.id)
            assert log.since(0) == []
            assert [change for _, change in stranger.since(0)] == [{"n": 0}]
