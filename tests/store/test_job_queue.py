import threading
import time
from concurrent.futures import Future

import pytest

from bridle.store.errors import StoreBusy, StoreClosed
from bridle.store.writing.job_queue import JobQueue, WriteJob


@pytest.fixture
def queue():
    queue = JobQueue(limit=3, patience=30)
    queue.open()
    return queue


@pytest.fixture
def unhurried(monkeypatch):
    """Beginnings lie for longer than the machine may stand still."""
    monkeypatch.setattr("bridle.store.writing.job_queue._GATHER_S", 30.0)


def job(name):
    return WriteJob((name,))


def soon(seconds=5.0):
    return time.monotonic() + seconds


def names(jobs):
    return [record for job in jobs for record in job.records]


@pytest.mark.usefixtures("unhurried")
def test_a_beginning_goes_with_its_end(queue):
    queue.put_beginning("a", job("a begins"))
    queue.put_beginning("b", job("b begins"))
    queue.put(job("a ends"), follows=("a",))
    assert names(queue.take(soon())) == ["a begins", "a ends"]
    assert len(queue) == 1


def test_what_ends_nothing_comes_after_all_that_has_begun(queue):
    queue.put_beginning("a", job("a begins"))
    queue.put_beginning("b", job("b begins"))
    queue.put(job("a note on b"))
    assert names(queue.take(soon())) == ["a begins", "b begins", "a note on b"]


def test_a_beginning_without_an_end_is_written_a_moment_later(queue):
    began = time.monotonic()
    queue.put_beginning("a", job("a begins"))
    assert names(queue.take(soon())) == ["a begins"]
    assert 0.04 < time.monotonic() - began < 2
    queue.put(job("a ends"), follows=("a",))
    assert names(queue.take(soon())) == ["a ends"]


def test_an_end_follows_a_beginning_that_has_lain_long_enough(queue):
    queue.put_beginning("a", job("a begins"))
    time.sleep(0.06)
    queue.put(job("a ends"), follows=("a",))
    assert names(queue.take(soon())) == ["a begins", "a ends"]


def test_nothing_comes_until_the_time_is_over(queue):
    began = time.monotonic()
    assert queue.take(soon(0.05)) == []
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("beginning", [True, False])
def test_a_sleeping_taker_is_woken(queue, beginning):
    found: Future[list[WriteJob]] = Future()
    taker = threading.Thread(target=lambda: found.set_result(queue.take(soon(30))))
    taker.start()
    time.sleep(0.05)
    if beginning:
        queue.put_beginning("a", job("first"))
    else:
        queue.put(job("first"))
    assert names(found.result(timeout=5)) == ["first"]
    taker.join()


@pytest.mark.usefixtures("unhurried")
def test_a_full_queue_takes_ends_and_nothing_else(queue):
    for name in "abc":
        queue.put_beginning(name, job(f"{name} begins"))
    with pytest.raises(StoreBusy):
        queue.put(job("reward"))
    with pytest.raises(StoreBusy):
        queue.put_beginning("d", job("d begins"))
    queue.put(job("b ends"), refuse=False, follows=("b",))
    assert names(queue.take(soon())) == ["b begins", "b ends"]


def test_what_is_queued_can_be_taken_after_the_close(queue):
    queue.put_beginning("a", job("a begins"))
    queue.put(job("reward"))
    assert queue.close()
    with pytest.raises(StoreClosed):
        queue.put(job("late"), refuse=False)
    assert names(queue.take(soon())) == ["a begins", "reward"]
    assert queue.take(soon()) == []
    assert not queue.close()


@pytest.mark.usefixtures("unhurried")
def test_an_end_brings_all_that_it_follows_in_the_order_named(queue):
    queue.put_beginning("session", job("session opens"))
    queue.put_beginning("a", job("a begins"))
    queue.put_beginning("b", job("b begins"))
    queue.put(job("b ends"), refuse=False, follows=("session", "b"))
    queue.put(job("a ends"), refuse=False, follows=("session", "a"))
    expected = ["session opens", "b begins", "b ends", "a begins", "a ends"]
    assert names(queue.take(soon())) == expected


def test_a_taker_that_has_just_had_work_finds_a_beginning_without_being_woken(queue):
    queue.put(job("first"))
    assert names(queue.take(soon())) == ["first"]
    found: Future[list[WriteJob]] = Future()
    taker = threading.Thread(target=lambda: found.set_result(queue.take(soon(30))))
    taker.start()
    time.sleep(0.02)
    assert not queue._dozing, "a beginning need not wake it"
    queue.put_beginning("a", job("a begins"))
    assert names(found.result(timeout=5)) == ["a begins"]
    taker.join()


def test_a_taker_that_never_sleeps_is_not_rung_for(queue):
    for number in range(100):
        queue.put(job(number))
        assert names(queue.take(soon())) == [number]
    assert queue._bell.empty()
