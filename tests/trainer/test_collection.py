"""Test when groups begin, and which of them a step takes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from bridle.errors import UsageError
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.collection.book import GroupBook
from bridle.trainer.collection.collector import Collector
from bridle.trainer.collection.curriculum import TaskChoice, horizon
from bridle.trainer.collection.renumbering import Renumbering
from bridle.trainer.collection.session_book import SessionBook
from bridle.trainer.collection.sessions import collector_of
from bridle.trainer.config import AdvantageConfig, DistillationConfig, FilterConfig, GrpoConfig


def begin_all(book, version, steps_left=99):
    begun = []
    while (number := book.begin(version, steps_left)) is not None:
        book.begun(number, version)
        begun.append(number)
    return begun


def finish(book, numbers, version=0, verdict="live"):
    for number in numbers:
        book.finish(number)
        book.judge(number, verdict, version)


@pytest.mark.parametrize(("staleness", "begun"), [(0, 2), (1, 4), (3, 8)])
def test_groups_of_as_many_steps_as_may_be_stale_run_ahead(staleness, begun):
    book = GroupBook(per_step=2, max_staleness=staleness, limit=2)
    assert begin_all(book, 0) == list(range(begun))


def test_no_group_begins_that_no_step_will_take():
    assert begin_all(GroupBook(per_step=2, max_staleness=5, limit=2), 0, steps_left=2) == [
        *range(4)
    ]


def test_a_step_takes_the_oldest_finished_groups_and_waits_for_no_slow_one():
    book = GroupBook(per_step=2, max_staleness=1, limit=2)
    begin_all(book, 0)
    finish(book, [3, 1])
    assert book.ready() == [1, 3]
    finish(book, [2])
    assert book.ready() == [1, 2]
    book.take([1, 2])
    assert book.ready() is None
    assert begin_all(book, 1) == [4, 5]


def test_a_group_that_begins_while_the_next_version_is_made_counts_as_one_older():
    book = GroupBook(per_step=2, max_staleness=1, limit=2)
    begin_all(book, 0)
    finish(book, [0, 1])
    book.take([0, 1])
    # Two were begun at version 0 and wait for version 1: more would wait for version 2.
    assert book.begin(0, 9, training=True) is None
    assert book.begin(1, 9) == 4


def test_a_group_that_is_overdue_gives_its_place_to_another():
    book = GroupBook(per_step=1, max_staleness=1, limit=1)
    assert begin_all(book, 0) == [0, 1]
    finish(book, [1])
    book.take([1])
    assert begin_all(book, 1) == [2]
    finish(book, [2])
    book.take([2])
    # Group 0 runs since version 0 and could not be trained whole at version 2.
    assert begin_all(book, 2) == [3, 4]


def test_a_group_that_has_no_slot_yet_is_not_overdue():
    book = GroupBook(per_step=1, max_staleness=0, limit=1)
    book.begin(0, 9)
    assert book.begin(5, 9) is None


def test_spent_groups_are_replaced_up_to_the_limit_and_late_ones_always():
    book = GroupBook(per_step=2, max_staleness=0, limit=3)
    assert begin_all(book, 0) == [0, 1]
    finish(book, [0], verdict="spent")
    assert begin_all(book, 0) == [2]
    finish(book, [1], verdict="late")
    assert begin_all(book, 0) == [3]
    finish(book, [2], verdict="spent")
    assert begin_all(book, 0) == [], "two live ones would be four in all"
    finish(book, [3])
    assert book.ready() == [0, 1, 2, 3]


def test_what_has_been_taken_is_kept_and_never_begun_again():
    book = GroupBook(per_step=1, max_staleness=3, limit=1)
    begin_all(book, 0)
    finish(book, [0, 1, 3])
    book.take([0])
    book.take([1])
    book.take([3])
    assert book.as_data() == {"first": 2, "taken": [3]}
    again = GroupBook(per_step=1, max_staleness=3, limit=1)
    again.restore(book.as_data())
    assert begin_all(again, 3) == [2, 4, 5, 6]


# -- the collector -----------------------------------------------------------------------------


class Sessions:
    """Groups whose sessions end when a test says so; a group's reward is by its number."""

    def __init__(self, make_sample, make_episode, size=2):
        self.make_sample, self.make_episode, self.size = make_sample, make_episode, size
        self.begun: list[int] = []
        self.futures: dict[int, Future] = {}
        self.ended: dict[int, object] = {}
        self.changed = threading.Condition()
        self.version = 0
        self.equal: set[int] = set()

    def start(self, number, begun, ended):
        begun()
        with self.changed:
            self.begun.append(number)
            self.futures[number] = Future()
            self.ended[number] = ended
            self.changed.notify_all()
        return self.futures[number]

    def until_begun(self, *numbers):
        with self.changed:
            assert self.changed.wait_for(lambda: set(numbers) <= set(self.begun), timeout=10)

    def end(self, number, version=0):
        self.futures[number].set_result([f"s{number:03}-{m}@{version}" for m in range(self.size)])

    def load(self, session_id):
        name, version = session_id.split("@")
        group, member = name[1:].split("-")
        reward = 1.0 if int(group) in self.equal else float(member)
        sample = self.make_sample([1, 2, 3], [2], session=session_id, version=int(version))
        return self.make_episode([sample], reward, session=session_id, group=group)


@pytest.fixture
def sessions(make_sample, make_episode):
    return Sessions(make_sample, make_episode)


def collector(sessions, per_step=2, steps=9, **config):
    config = GrpoConfig(steps=steps, **config)
    return Collector(sessions.start, sessions.load, config, per_step=per_step)


def groups(episodes):
    return sorted({int(episode.session.group_id) for episode in episodes})


def asked(collect, step, version):
    """A step that is being waited for, in a thread."""
    found: Future = Future()

    def work():
        try:
            found.set_result(collect(step, version))
        except RuntimeError as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return found


def test_a_slow_session_holds_its_group_and_no_other(sessions):
    with collector(sessions, max_staleness=1) as collect:
        first = asked(collect, 0, 0)
        sessions.until_begun(0, 1, 2, 3)
        for number in (1, 2):
            sessions.end(number)
        assert groups(first.result(10)) == [1, 2]
        collect.published(1)
        sessions.until_begun(4, 5)
        sessions.end(0)
        sessions.end(5, version=0)
        assert groups(asked(collect, 1, 1).result(10)) == [0, 5]


def test_on_policy_no_group_begins_before_the_trainer_waits_for_it(sessions):
    with collector(sessions) as collect:
        first = asked(collect, 0, 0)
        sessions.until_begun(0, 1)
        sessions.end(1)
        sessions.end(0)
        assert [one.session.id for one in first.result(10)] == [
            *("s000-0@0", "s000-1@0", "s001-0@0", "s001-1@0")
        ]
        collect.published(1)
        second = asked(collect, 1, 1)
        sessions.until_begun(2, 3)
        assert sessions.begun == [0, 1, 2, 3]
        sessions.end(2, version=1)
        sessions.end(3, version=1)
        second.result(10)


def test_a_group_of_which_all_is_too_old_is_taken_and_replaced(sessions):
    with collector(sessions, per_step=1, max_staleness=1) as collect:
        first = asked(collect, 0, 0)
        sessions.until_begun(0, 1)
        sessions.end(1)
        first.result(10)
        second = asked(collect, 1, 1)
        sessions.until_begun(2)
        sessions.end(2, version=1)
        second.result(10)
        third = asked(collect, 2, 2)
        sessions.until_begun(3, 4)
        sessions.end(0)
        sessions.end(3, version=2)
        assert groups(third.result(10)) == [0, 3]


def test_groups_of_equal_rewards_are_replaced_until_the_step_is_full(sessions):
    sessions.equal = {0, 2}
    with collector(sessions, filters=FilterConfig(refill=4)) as collect:
        step = asked(collect, 0, 0)
        for number in range(4):
            sessions.until_begun(number)
            sessions.end(number)
        assert groups(step.result(10)) == [0, 1, 2, 3]
        assert sessions.begun == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "more",
    [
        {"distillation": DistillationConfig(url="http://teacher:8000")},
        {"advantages": AdvantageConfig("igpo")},
    ],
)
def test_groups_of_equal_rewards_are_not_replaced_where_something_else_teaches(sessions, more):
    sessions.equal = {0, 1}
    with collector(sessions, filters=FilterConfig(refill=4), **more) as collect:
        step = asked(collect, 0, 0)
        for number in range(2):
            sessions.until_begun(number)
            sessions.end(number)
        assert groups(step.result(10)) == [0, 1]


def test_what_running_a_group_raises_is_raised_by_the_step(sessions):
    with collector(sessions) as collect:
        step = asked(collect, 0, 0)
        sessions.until_begun(1)
        sessions.futures[1].set_exception(RuntimeError("no engine"))
        with pytest.raises(RuntimeError, match="no engine"):
            step.result(10)


def test_a_checkpoint_without_groups_goes_on_behind_its_steps(sessions):
    collect = collector(sessions)
    collect.restore({}, 3)
    assert collect.groups() == {"first": 6, "taken": []}


def test_where_half_of_the_tasks_teach_nothing_nearly_every_group_is_live(sessions):
    """DAPO's refill: the share of live groups among those that fill the steps."""
    sessions.equal = {number for number in range(400) if number % 2}
    steps, per_step = 6, 4
    config = {"filters": FilterConfig(refill=8)}
    live = 0
    with collector(sessions, per_step=per_step, steps=steps, **config) as collect:
        for step in range(steps):
            waiting = asked(collect, step, 0)
            while not waiting.done():
                with sessions.changed:
                    for number, future in list(sessions.futures.items()):
                        if not future.done():
                            sessions.end(number)
                    sessions.changed.wait(0.02)
            taken = waiting.result()
            prepared = prepare(taken, 0, GrpoConfig(**config))
            live += prepared.groups - prepared.degenerate_groups
            assert prepared.degenerate_groups > 0, "half of what was run taught nothing"
    assert live / (steps * per_step) >= 0.95


# -- by sessions ------------------------------------------------------------------------------


def by_sessions(sessions, per_step=2, max_staleness=1, **config):
    config = GrpoConfig(steps=9, collection="sessions", max_staleness=max_staleness, **config)
    return collector_of(
        sessions.start, sessions.load, config, per_step=per_step, group_size=sessions.size
    )


def ids(episodes):
    return sorted(episode.session.id for episode in episodes)


def test_as_many_sessions_run_or_wait_as_their_mean_lag_allows():
    book = SessionBook(per_step=8, group_size=4, lag=2, limit=8)
    begun = []
    while (number := book.begin(99)) is not None:
        begun.append(number)
    assert begun == [*range(6)]
    assert book.begin(1) is None
    for member in "abcd":
        book.end(3, member)
    book.judge(3, (), live=True, version=0)
    assert book.ready() is None, "four of eight"
    book.end(5, "e")
    book.judge(5, (), live=False, version=0)
    assert book.ready() is None, "the fifth has no sibling yet"
    for member in "fgh":
        book.end(5, member)
    book.judge(5, (), live=True, version=0)
    assert book.ready() == {3: [*"abcd"], 5: [*"efgh"]}
    book.take({3: ["a", "b"], 5: [*"efgh"]})
    assert [book.begin(99) for _ in range(3)] == [6, 7, None]


@pytest.mark.parametrize("refill", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_steps_are_full_to_the_last_whatever_teaches_something(refill, seed):
    """Sessions end in any order, and groups are spent at random."""
    draw = np.random.default_rng(seed)
    book = SessionBook(per_step=6, group_size=4, lag=1, limit=6 * refill)
    running: list[tuple[int, str]] = []
    steps = 0
    while steps < 5:
        while (number := book.begin(5 - steps)) is not None:
            running += [(number, f"{number}-{member}") for member in range(4)]
        if (chosen := book.ready()) is not None:
            book.take(chosen)
            steps += 1
            continue
        assert running, "nothing runs, and the step is not full"
        number, one = running.pop(draw.integers(len(running)))
        book.end(number, one)
        if not any(group == number for group, _ in running):
            book.finish(number)
        for each in book.unjudged(steps):
            late = [one for one in book.waiting(each) if draw.random() < 0.1]
            book.judge(each, late, live=bool(each % 3), version=steps)


def test_a_session_is_trained_before_its_slow_sibling_ends_and_counts_in_its_baseline(sessions):
    with by_sessions(sessions, per_step=1) as collect:
        first = asked(collect, 0, 0)
        sessions.size = 3
        sessions.until_begun(0, 1)
        sessions.ended[0]("s000-0@0")
        sessions.ended[1]("s001-1@0")
        assert not first.done(), "neither has a sibling"
        sessions.ended[0]("s000-1@0")
        assert ids(first.result(10)) == ["s000-0@0", "s000-1@0"]
        assert collect.earlier() == []
        assert collect.groups() == {
            "first": 0,
            "taken": [],
            "partial": {"0": ["s000-0@0", "s000-1@0"]},
        }
        collect.published(1)
        second = asked(collect, 1, 1)
        sessions.ended[0]("s000-2@1")
        sessions.end(0)
        sessions.ended[1]("s001-0@0")
        # By member: rewards of 0, 1 and 2, of which the last is trained now.
        taken = second.result(10)
        assert ids(taken) == ["s000-2@1", "s001-1@0"]
        assert ids(collect.earlier()) == ["s000-0@0", "s000-1@0"]
        mean = GrpoConfig(
            collection="sessions", max_staleness=1, advantages=AdvantageConfig("leave_one_out")
        )
        prepared = prepare(taken, 1, mean, earlier=collect.earlier())
        late = next(i for i, one in enumerate(taken) if one.session.id == "s000-2@1")
        credit = [item.credit for item in prepared.items if item.session == late]
        assert credit[0][2] == pytest.approx(2 - 0.5)
        assert prepared.session_rewards == {late: 2.0, 1 - late: 1.0}
        assert len(prepared.accounts) == 2
        assert collect.groups()["first"] == 1


@pytest.mark.parametrize("baseline", ["spiral", "critic"])
def test_an_estimator_that_remembers_learns_from_each_session_once(
    make_sample, make_episode, baseline
):
    own, before = (
        make_episode([make_sample([1, 2, 3], [2], session=name)], reward, session=name, group="g")
        for name, reward in (("a", 1.0), ("b", 0.0))
    )
    config = GrpoConfig(advantages=AdvantageConfig(baseline))
    alone, beside = {}, {}
    prepare([own], 0, config, alone)
    prepare([own], 0, config, beside, earlier=[before])
    assert alone == beside != {}


def test_equal_rewards_wait_for_a_sibling_and_are_taken_once_none_is_left(sessions):
    sessions.equal = {0}
    with by_sessions(sessions, per_step=1) as collect:
        step = asked(collect, 0, 0)
        sessions.until_begun(0, 1)
        sessions.ended[0]("s000-0@0")
        sessions.ended[0]("s000-1@0")
        sessions.ended[1]("s001-0@0")
        time.sleep(0.05)
        assert not step.done()
        sessions.end(0)
        assert ids(step.result(10)) == ["s000-0@0", "s000-1@0"]


def test_a_session_of_which_all_is_too_old_is_left_out_and_costs_no_other(sessions):
    with by_sessions(sessions, per_step=1, max_age=1) as collect:
        first = asked(collect, 0, 0)
        sessions.until_begun(0, 1)
        sessions.ended[1]("s001-0@0")
        sessions.ended[1]("s001-1@0")
        first.result(10)
        for version in (1, 2):
            collect.published(version)
        step = asked(collect, 1, 2)
        sessions.ended[0]("s000-0@0")
        sessions.until_begun(2)
        sessions.ended[2]("s002-0@2")
        sessions.ended[2]("s002-1@2")
        taken = step.result(10)
        assert ids(taken) == ["s000-0@0", "s002-0@2", "s002-1@2"]
        config = GrpoConfig(collection="sessions", max_staleness=1, max_age=1)
        assert prepare(taken, 2, config).sessions_dropped == {"stale": 1}


def test_sessions_that_an_earlier_attempt_took_are_not_taken_again(sessions):
    with by_sessions(sessions, per_step=1) as collect:
        collect.restore({"first": 4, "taken": [5], "partial": {"4": ["s004-0@0"]}}, 3)
        assert collect.groups()["partial"] == {"4": ["s004-0@0"]}
        step = asked(collect, 3, 3)
        sessions.until_begun(4, 6, 7)
        assert sessions.begun == [4, 6, 7]
        sessions.ended[4]("s004-0@0")
        sessions.ended[4]("s004-1@3")
        sessions.ended[6]("s006-0@3")
        sessions.ended[6]("s006-1@3")
        assert ids(step.result(10)) == ["s004-1@3", "s006-0@3"]
        assert ids(collect.earlier()) == ["s004-0@0"]


def test_on_policy_whole_groups_are_taken(sessions):
    with pytest.raises(UsageError, match="set max_staleness to 1 or more"):
        by_sessions(sessions, max_staleness=0)


# -- which task -----------------------------------------------------------------------------------


def test_tasks_are_drawn_by_the_spread_of_their_attempts():
    choice = TaskChoice(["never", "half", "always", "new"], seed=1)
    for key, rewards in {"never": [0] * 8, "half": [0, 1] * 4, "always": [1] * 8}.items():
        choice.learn((key, float(reward)) for reward in rewards)
    choice.learn([("of another run", 1.0)])
    chances = [1 / 10, 5 / 10, 9 / 10, 1 / 2]
    spread = np.asarray([p * (1 - p) for p in chances])
    assert choice.weights() == pytest.approx(spread / spread.sum(), abs=1e-12)
    drawn = np.bincount([choice.draw(number) for number in range(4000)], minlength=4) / 4000
    assert drawn == pytest.approx(spread / spread.sum(), abs=0.03)
    assert choice.draw(7) == choice.draw(7)


def test_the_horizon_grows_in_phases():
    found = [horizon(step, start=5, growth=3, every=2) for step in range(7)]
    assert found == [5, 5, 8, 8, 11, 11, 14]


# -- versions of earlier attempts ----------------------------------------------------------------


def test_what_a_lost_attempt_sampled_counts_by_updates_from_the_checkpoint_on():
    # Version 5 was checkpointed and 6 and 7 published; 5's weights come back as 8.
    once = Renumbering().resumed(5, 8)
    recorded = np.asarray([-1, 4, 5, 6, 7, 8, 9])
    assert once.versions(recorded).tolist() == [-1, 7, 8, 9, 10, 8, 9]
    # It is lost again after publishing 9: 8's weights come back as 10.
    twice = once.resumed(8, 10)
    assert twice.versions(recorded).tolist() == [-1, 9, 10, 11, 12, 10, 11]


def test_without_a_lost_attempt_a_session_is_as_it_was_recorded(make_sample, make_episode):
    episode = make_episode([make_sample([1, 2], [1], version=3)], 1.0)
    assert Renumbering().episode(episode) is episode
    (sample,) = Renumbering().resumed(3, 5).episode(episode).samples
    assert sample.versions.tolist() == [-1, 5]
