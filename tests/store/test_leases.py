"""Leases on sealed sessions: each reaches every consumer at least once, never two at a time."""

from __future__ import annotations

import threading
import time

import pytest

from bridle.store.operations import leases
from bridle.store.operations.leases import Leases, UnknownLease
from bridle.store.operations.retention import forget
from bridle.store.reward import Reward
from bridle.store.schema.database import connect


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(leases, "SETTLE_S", -1.0)


@pytest.fixture
def sealed(writer, calls):
    """``sealed(**fields)`` makes a session that was sealed a second after the one before."""
    clock = iter(range(1, 1000))

    def make(**fields):
        session = calls.session(sealed_at=float(next(clock)), **fields)
        writer.add_sync(session)
        return session.id

    return make


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def one(url, clock):
    engine = connect(url)
    yield Leases(engine, clock)
    engine.dispose()


@pytest.fixture
def other(url, clock):
    """Another process's view of the same store."""
    engine = connect(url)
    yield Leases(engine, clock)
    engine.dispose()


def test_what_one_proxy_has_leased_another_does_not_hand_out(one, other, sealed):
    made = [sealed() for _ in range(3)]
    first = one.lease("trl", 2, 60)
    second = other.lease("trl", 2, 60)
    assert (first.sessions, second.sessions) == (tuple(made[:2]), tuple(made[2:]))
    assert one.lease("trl", 1, 60) is None


def test_a_lease_may_be_acknowledged_or_released_at_another_proxy(one, other, sealed):
    made = [sealed() for _ in range(2)]
    first, second = one.lease("trl", 1, 60), one.lease("trl", 1, 60)
    assert other.acknowledge("trl", first.id) == made[:1]
    other.release("trl", second.id)
    assert one.lease("trl", 9, 60).sessions == (made[1],)


def test_a_lease_that_ran_out_is_handed_out_again_and_cannot_be_acknowledged(
    one, other, sealed, clock
):
    made = sealed()
    lost = one.lease("trl", 1, 60)
    clock.now += 61
    again = other.lease("trl", 1, 60)
    assert again.sessions == (made,)
    for late in (one.acknowledge, one.release):
        with pytest.raises(UnknownLease):
            late("trl", lost.id)
    other.acknowledge("trl", again.id)
    clock.now += 1e6
    assert one.lease("trl", 1, 60) is None


def test_consumers_do_not_see_each_other(one, sealed):
    made = sealed()
    lease = one.lease("trl", 1, 60)
    assert one.lease("verl", 1, 60).sessions == (made,)
    with pytest.raises(UnknownLease):
        one.acknowledge("verl", lease.id)


def test_only_a_runs_and_only_rewarded_sessions_when_asked(one, sealed, writer):
    plain, scored = sealed(), sealed()
    writer.add_sync(Reward(scored, "score", 1.0, time.time()))
    assert one.lease("a", 9, 60, rewarded_by=("operator",)).sessions == (scored,)
    assert one.lease("a", 9, 60).sessions == (plain,)
    assert one.lease("b", 9, 60, run="run_none") is None


def test_sessions_sealed_this_moment_wait(one, writer, calls, monkeypatch, clock):
    monkeypatch.setattr(leases, "SETTLE_S", 1.0)
    writer.add_sync(calls.session(sealed_at=clock.now))
    assert one.lease("trl", 1, 60) is None
    clock.now += 1.5
    assert one.lease("trl", 1, 60) is not None


def test_a_forgotten_session_takes_its_leases_along(one, reader, sealed):
    made = sealed()
    lease = one.lease("trl", 1, 60)
    assert forget(reader.engine, [made]).sessions == 1
    with pytest.raises(UnknownLease):
        one.acknowledge("trl", lease.id)


def test_consumers_that_ask_at_once_share_the_sessions_out(one, other, sealed):
    made = {sealed() for _ in range(24)}
    taken: list[str] = []

    def work(source: Leases) -> None:
        while (lease := source.lease("trl", 2, 60)) is not None:
            taken.extend(lease.sessions)

    threads = [threading.Thread(target=work, args=(source,)) for source in (one, other) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 24
    assert set(taken) == made
