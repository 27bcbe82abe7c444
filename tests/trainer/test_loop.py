"""The whole loop on a bandit: sessions sampled from the policy itself, rewarded by their tokens."""

import dataclasses
import itertools
import time
from collections import Counter

import numpy as np
import orjson
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bridle.store.reading.queries import Reader
from bridle.store.records import PolicyRecord, RunRecord
from bridle.store.schema.database import migrate
from bridle.store.trained import SpanScores
from bridle.store.writing.writer import Writer
from bridle.trainer.batch.fates import NO_UPDATE, StepFates, step_fates
from bridle.trainer.batch.filters import DropReason, account_of
from bridle.trainer.config import (
    AdvantageConfig,
    CheckpointConfig,
    FilterConfig,
    GrpoConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PackingConfig,
)
from bridle.trainer.learner.checkpoint import CheckpointError, checkpoints
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.lora import adapters
from bridle.trainer.policy.model import ON_CPU, load_policy, trainable_policy
from bridle.trainer.sinks import SinkGroup, StoreSink
from bridle.trainer.sinks.tensorboard import TensorBoardSink

CONFIG = GrpoConfig(
    steps=12,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    packing=PackingConfig(max_tokens=64, block_tokens=16),
)


def run(loop):
    reports = []
    loop.run(reports.append)
    return reports


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"loss": LossConfig(weighting="token"), "advantages": AdvantageConfig("leave_one_out")},
        {
            "loss": LossConfig(weighting="constant", constant_tokens=2),
            "advantages": AdvantageConfig("mean"),
        },
        {"loss": LossConfig(name="gspo", clip_low=0.05, clip_high=0.05), "minibatches": 2},
        {"loss": LossConfig(name="cispo"), "epochs": 2},
        {"packing": PackingConfig(layout="padded", max_tokens=64)},
    ],
    ids=["grpo", "dapo-rloo", "dr-grpo", "gspo", "cispo", "padded"],
)
def test_the_reward_rises_with_every_algorithm(bandit_loop, change):
    loop, _ = bandit_loop(dataclasses.replace(CONFIG, **change))
    reports = run(loop)
    assert reports[0].reward_mean < 0.75
    assert reports[-1].reward_mean > 0.9


def test_the_reward_rises_with_adapters_alone(bandit_loop):
    optimizer = OptimizerConfig(learning_rate=2e-2)
    loop, _ = bandit_loop(
        dataclasses.replace(CONFIG, steps=30, lora=LoraConfig(rank=4), optimizer=optimizer)
    )
    # A random output head, which stays as it is, hardly tells one token from another.
    head = loop.learner.model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(16)
    before = head.clone()
    reports = run(loop)
    assert reports[0].reward_mean < 0.75
    assert reports[-1].reward_mean > 0.9
    assert torch.equal(head, before)


def test_a_floor_holds_the_entropy_that_training_alone_takes_away(bandit_loop):
    def entropies(**loss):
        config = dataclasses.replace(CONFIG, steps=16, loss=LossConfig(**loss))
        loop, _ = bandit_loop(config)
        return [report.metrics()["update/entropy"] for report in run(loop) if report.update], loop

    alone, _ = entropies()
    floor = alone[0] - 0.1
    held, loop = entropies(entropy_floor=floor, entropy_step=0.5)
    assert alone[-1] < floor - 0.3
    assert held[-1] > alone[-1] + 0.3
    kept = loop.policies[0].kept_memory
    assert kept["entropy/last"] == pytest.approx(held[-1]), "a checkpoint has it"
    assert kept["entropy/coefficient"] > 0


def test_a_learning_rate_of_zero_learns_nothing_and_changes_no_bit(bandit_loop):
    config = dataclasses.replace(
        CONFIG, optimizer=OptimizerConfig(learning_rate=0.0, weight_decay=0.1), epochs=2
    )
    loop, _ = bandit_loop(config)
    before = [parameter.detach().clone() for parameter in loop.learner.model.parameters()]
    reports = run(loop)
    assert all(report.update.grad_norms[0] > 0 for report in reports)
    assert all(report.update.loss.mean("ratio") == 1.0 for report in reports)
    for old, new in zip(before, loop.learner.model.parameters(), strict=True):
        assert torch.equal(old, new)
    assert np.mean([report.reward_mean for report in reports]) < 0.75


def test_a_step_reports_what_it_did_and_where_every_token_went(bandit_loop):
    loop, bandit = bandit_loop(dataclasses.replace(CONFIG, steps=3, epochs=2))
    report = run(loop)[-1]
    assert report.version == 3
    assert report.logprob_gap < 1e-5
    metrics = report.metrics()
    sessions = bandit.sessions * len(bandit.prompts)
    assert metrics["sessions/collected"] == sessions
    assert metrics["tokens/captured"] == sessions * (bandit.sampled + 1)
    assert metrics["tokens/captured"] == (
        metrics["tokens/trained"] + metrics["tokens/masked"] + metrics["tokens/dropped"]
    )
    assert metrics["tokens/masked/length"] == sessions
    assert metrics["packing/computed_tokens"] < metrics["packing/unshared_tokens"]
    assert 0 < metrics["update/entropy"] < np.log(64) + 1e-3
    for phase in ("collect", "prepare", "score", "update"):
        assert metrics[f"seconds/{phase}"] >= 0
    assert {"update/loss", "update/grad_norm", "update/clip_fraction", "update/kl_old"} <= set(
        metrics
    )


def test_with_more_than_one_update_the_ratio_is_to_the_policy_before_the_first(bandit_loop):
    loop, _ = bandit_loop(dataclasses.replace(CONFIG, steps=1, minibatches=2, epochs=2))
    (report,) = run(loop)
    assert len(report.update.grad_norms) == 4
    assert report.update.loss.mean("kl_old") > 0
    assert report.logprob_gap < 1e-5
    # Two passes, yet each trained token's gap is measured once.
    assert report.update.gap.tokens == report.prepared.account.trained


def test_the_gap_sees_an_engine_that_disagrees(bandit_loop, monkeypatch):
    loop, bandit = bandit_loop(dataclasses.replace(CONFIG, steps=1))
    original = bandit.make_sample
    bandit.make_sample = lambda *a, logprobs, **k: original(
        *a, logprobs=[value + 0.25 for value in logprobs], **k
    )
    (report,) = run(loop)
    assert report.logprob_gap == pytest.approx(0.25, abs=1e-4)


def test_stale_sessions_are_dropped_and_without_any_left_the_version_stays(bandit_loop):
    published = []
    loop, bandit = bandit_loop(
        dataclasses.replace(CONFIG, steps=1), publish=lambda _m, version: published.append(version)
    )
    bandit.lag = 1
    (report,) = run(loop)
    assert report.update is None
    assert (report.version, published) == (0, [])
    assert report.prepared.account.dropped == {DropReason.STALE.value: 24 * 2 * bandit.sampled}
    assert report.metrics()["sessions/dropped/stale"] == 48
    assert "staleness/max" not in report.metrics()


def test_staleness_is_that_of_the_tokens_that_were_trained(bandit_loop):
    loop, bandit = bandit_loop(dataclasses.replace(CONFIG, steps=1, max_staleness=2))
    original = bandit.make_sample
    lags = itertools.cycle([0, 0, 1, 2])
    bandit.make_sample = lambda *a, version, **k: original(*a, version=version - next(lags), **k)
    (report,) = run(loop)
    metrics = report.metrics()
    assert metrics["tokens/trained"] == len(report.prepared.staleness)
    assert metrics["staleness/mean"] == pytest.approx(0.75, abs=0.1)
    assert metrics["staleness/max"] == 2


def test_an_update_that_is_not_taken_is_told_and_publishes_nothing(bandit_loop, caplog):
    published = []
    loop, bandit = bandit_loop(
        dataclasses.replace(CONFIG, steps=1), publish=lambda _m, version: published.append(version)
    )
    original = bandit.make_sample
    bandit.make_sample = lambda *a, logprobs, **k: original(
        *a, logprobs=[float("nan") for _ in logprobs], **k
    )
    (report,) = run(loop)
    assert report.metrics()["update/skipped"] == 1
    assert (report.version, published) == (0, [])
    assert "step 1: 1 of 1 updates were not taken" in caplog.text


def test_weights_are_published_once_per_step_with_the_next_version(bandit_loop):
    published = []

    def publish(model, version):
        published.append((version, model))
        return PolicyRecord("run", version, 0.0, verified=True)

    loop, bandit = bandit_loop(dataclasses.replace(CONFIG, steps=3), publish=publish, version=7)
    reports = run(loop)
    assert [version for version, _ in published] == [8, 9, 10]
    assert bandit.versions == [7, 8, 9]
    assert [report.policy.version for report in reports] == [8, 9, 10]


def weights(loop):
    return [parameter.detach().clone() for parameter in loop.learner.model.parameters()]


def assert_equal_weights(first, second):
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_stopping_and_resuming_gives_the_weights_of_never_having_stopped(bandit_loop, tmp_path):
    config = dataclasses.replace(CONFIG, steps=4, minibatches=2)
    torch.manual_seed(3)
    straight, _ = bandit_loop(config, directory=tmp_path / "straight")
    run(straight)

    torch.manual_seed(3)
    first, _ = bandit_loop(config)
    first.run(lambda report: report.step == 1)
    assert first.step == 2
    torch.manual_seed(55)
    second, _ = bandit_loop(config)
    progress = second.resume()
    assert (progress.step, progress.version) == (2, 2)
    assert [report.step for report in run(second)] == [2, 3]
    assert_equal_weights(weights(straight), weights(second))


def test_a_running_baseline_goes_on_from_the_checkpoint(bandit_loop, tmp_path):
    config = dataclasses.replace(CONFIG, steps=3, advantages=AdvantageConfig("spiral"))
    torch.manual_seed(3)
    straight, _ = bandit_loop(config, directory=tmp_path / "straight")
    run(straight)
    torch.manual_seed(3)
    first, _ = bandit_loop(config)
    first.run(lambda report: report.step == 1)
    second, _ = bandit_loop(config)
    second.resume()
    assert second.policies[0].memory == first.policies[0].memory
    run(second)
    assert second.policies[0].memory == straight.policies[0].memory
    assert_equal_weights(weights(straight), weights(second))


def test_an_interrupt_while_collecting_checkpoints_the_last_completed_step(bandit_loop):
    config = dataclasses.replace(CONFIG, checkpoints=CheckpointConfig(every=100))
    loop, bandit = bandit_loop(config)

    def collect(step, version):
        if step == 3:
            raise KeyboardInterrupt
        return bandit(step, version)

    loop, bandit = bandit_loop(config, collect=collect)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    resumed, _ = bandit_loop(config)
    assert resumed.resume().step == 3
    assert_equal_weights(weights(loop), weights(resumed))


def test_an_interrupt_between_two_versions_leaves_the_last_whole_checkpoint(bandit_loop):
    def publish(model, version):
        if version == 3:
            raise KeyboardInterrupt
        return

    loop, _ = bandit_loop(CONFIG, publish=publish)
    kept = []
    with pytest.raises(KeyboardInterrupt):
        loop.run(lambda _report: kept.append(weights(loop)))
    resumed, _ = bandit_loop(CONFIG)
    assert resumed.resume().step == 2
    assert_equal_weights(kept[-1], weights(resumed))


@pytest.fixture
def slow_steps(monkeypatch):
    """Steps of ten seconds, by a clock that only their ends move: a list of reports to run with."""
    now = 0.0
    monkeypatch.setattr("bridle.trainer.loop.time.perf_counter", lambda: now)

    class Reports(list):
        def __call__(self, report):
            nonlocal now
            now += 10
            self.append(report)
            return len(self) == self.last

        last = 0

    return Reports()


def test_a_time_limit_ends_the_run_and_its_learning_rate_together(bandit_loop, slow_steps):
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="cosine")
    limited = dataclasses.replace(CONFIG, seconds=52.0, optimizer=optimizer)
    loop, _ = bandit_loop(limited)
    loop.run(slow_steps)
    rates = [report.learning_rate for report in slow_steps]
    assert len(rates) == 5
    assert rates[0] == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-3)
    assert rates == sorted(rates, reverse=True)


def test_what_earlier_attempts_took_counts_against_the_time_limit(bandit_loop, slow_steps):
    limited = dataclasses.replace(CONFIG, seconds=52.0)
    first, _ = bandit_loop(limited)
    slow_steps.last = 2
    first.run(slow_steps)
    assert first.seconds == 20
    again, _ = bandit_loop(limited)
    again.resume()
    again.run(slow_steps)
    assert [report.step for report in slow_steps] == [0, 1, 2, 3, 4]


def test_a_checkpoint_that_does_not_say_what_its_steps_took_can_be_gone_on_from(
    bandit_loop, slow_steps
):
    loop, _ = bandit_loop(dataclasses.replace(CONFIG, seconds=1e6))
    loop.step = CONFIG.steps - 2
    loop.run(slow_steps)
    assert len(slow_steps) == 2


def test_a_time_limit_that_is_over_allows_one_step_and_more_than_enough_changes_nothing(
    bandit_loop, slow_steps, tmp_path
):
    over, _ = bandit_loop(dataclasses.replace(CONFIG, seconds=-5.0))
    over.run(slow_steps)
    assert over.step == 1
    plenty, _ = bandit_loop(dataclasses.replace(CONFIG, seconds=1e6), directory=tmp_path / "other")
    plenty.run(slow_steps)
    assert plenty.step == CONFIG.steps


def test_resuming_from_nothing_is_an_error(bandit_loop):
    loop, _ = bandit_loop(CONFIG)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        loop.resume()


def test_checkpoints_come_as_often_as_asked_and_at_the_end(bandit_loop, tmp_path):
    config = dataclasses.replace(CONFIG, steps=5, checkpoints=CheckpointConfig(every=2, keep=9))
    loop, _ = bandit_loop(config)
    run(loop)
    names = [path.name[-1] for path in checkpoints(tmp_path / "checkpoints")]
    assert names == ["2", "4", "5"]


def test_the_kl_penalty_holds_the_policy_near_the_reference(bandit_loop, policy_directory):
    reports = {}
    for coefficient in (0.01, 3.0):
        torch.manual_seed(0)
        loop, _ = bandit_loop(
            dataclasses.replace(CONFIG, loss=LossConfig(kl_coefficient=coefficient)),
            reference=load_policy(policy_directory),
        )
        reports[coefficient] = run(loop)
    assert reports[0.01][0].update.loss.mean("kl_reference") == pytest.approx(0, abs=1e-6)
    free, held = (reports[c][-1].update.loss.mean("kl_reference") for c in (0.01, 3.0))
    assert held < free / 3
    assert reports[3.0][-1].metrics()["update/kl_reference"] == held


def test_the_policy_below_adapters_holds_as_a_second_copy_of_it_does(
    policy_directory, make_bandit, tmp_path
):
    lora, loss = LoraConfig(rank=4), LossConfig(kl_coefficient=0.5)
    config = dataclasses.replace(CONFIG, steps=3, minibatches=2, lora=lora, loss=loss)
    trained = []
    for copies in (1, 2):
        torch.manual_seed(0)
        model = trainable_policy(policy_directory, ON_CPU, lora)
        reference = model if copies == 1 else load_policy(policy_directory)
        learner = Learner(model, config, reference)
        loop = GrpoLoop(
            config, [TrainedPolicy(learner, tmp_path / str(copies))], make_bandit(model)
        )
        reports = run(loop)
        assert reports[-1].update.loss.mean("kl_reference") > 1e-4
        trained.append(adapters(model))
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_no_kl_to_a_reference_is_told_where_there_is_none(bandit_loop):
    loop, _ = bandit_loop(dataclasses.replace(CONFIG, steps=1))
    (report,) = run(loop)
    assert "update/kl_reference" not in report.metrics()


@pytest.mark.parametrize("epochs", [1, 2])
def test_what_compares_the_policy_with_itself_is_reported_of_several_updates_only(
    bandit_loop, epochs
):
    loop, _ = bandit_loop(dataclasses.replace(CONFIG, steps=1, minibatches=1, epochs=epochs))
    metrics = run(loop)[0].metrics()
    for name in ("update/clip_fraction", "update/ratio", "update/kl_old"):
        assert (name in metrics) == (epochs > 1)
    # The sampler and the trainer have the same weights here.
    assert metrics["kl/engine"] == metrics["kl/sampler"] < 1e-9
    assert metrics["importance/min"] == pytest.approx(1, abs=1e-3)
    if epochs == 1:
        assert metrics["importance/effective"] == pytest.approx(1)
        assert metrics["importance/outside"] == 0


def test_a_kl_penalty_without_a_reference_is_an_error(bandit_loop):
    with pytest.raises(ValueError, match="reference"):
        bandit_loop(dataclasses.replace(CONFIG, loss=LossConfig(kl_coefficient=0.1)))


def test_metrics_reach_tensorboard_and_the_store(bandit_loop, tmp_path):
    url = f"sqlite:///{tmp_path / 'store.db'}"
    migrate(url)
    board = tmp_path / "board"
    with Writer(url) as writer:
        writer.add_sync(RunRecord("run", "train", started_at=0.0))
        sink = SinkGroup(StoreSink(writer, "run"), [TensorBoardSink(board)])
        loop, _ = bandit_loop(dataclasses.replace(CONFIG, steps=2), sinks=sink)
        reports = run(loop)
        sink.write(2, {"odd": float("nan")})
        sink.close()
    events = EventAccumulator(str(board))
    events.Reload()
    expected = [report.reward_mean for report in reports]
    assert [e.value for e in events.Scalars("reward/mean")] == pytest.approx(expected)
    with Reader(url) as reader:
        stored = reader.metrics("run", "reward/mean")
        assert [(m.step, m.value) for m in stored] == list(enumerate(expected))
        assert reader.metrics("run", "odd") == []


def test_tensorboard_shows_of_a_resumed_run_what_counts(tmp_path):
    """An attempt that was killed before its checkpoint leaves steps that are taken again."""
    for steps, value in ((range(3), 1.0), (range(1, 4), 9.0)):
        sink = TensorBoardSink(tmp_path)
        for step in steps:
            sink.write(step, {"reward/mean": value})
        sink.close()
        time.sleep(1.1)  # its files are named by the second, and read in that order
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert shown == [(0, 1.0), (1, 9.0), (2, 9.0), (3, 9.0)]


def test_zero_variance_groups_still_train_when_asked_and_change_nothing(bandit_loop):
    """Their advantages are exact zeros."""
    config = dataclasses.replace(CONFIG, steps=1, filters=FilterConfig(drop_zero_variance=False))
    loop, bandit = bandit_loop(config)
    original = bandit.make_episode
    bandit.make_episode = lambda samples, _reward, **fields: original(samples, 1.0, **fields)
    before = weights(loop)
    (report,) = run(loop)
    assert report.update.grad_norms == (0.0,)
    assert report.prepared.account.trained == 24 * 2 * bandit.sampled
    assert_equal_weights(before, weights(loop))


def test_tokens_are_accounted_for_once_their_step_is_on_disk_and_once_only(bandit_loop, tmp_path):
    """The second attempt repeats a step, and gets again what its checkpoint has."""
    config = dataclasses.replace(CONFIG, steps=4, checkpoints=CheckpointConfig(every=2))
    written, on_disk = [], []

    def account(fates):
        written.append([(each.session_id, each.step) for each in fates])
        on_disk.append(len(checkpoints(tmp_path / "checkpoints")))

    def publish(model, version):
        if version == 4:
            raise KeyboardInterrupt

    torn, _ = bandit_loop(config, account=account, publish=publish)
    with pytest.raises(KeyboardInterrupt):
        torn.run()
    assert [{step for _, step in each} for each in written] == [{0, 1}]
    assert on_disk == [1], "the checkpoint comes first"
    resumed, bandit = bandit_loop(config, account=account)
    resumed.resume()
    assert written[1] == written[0]
    run(resumed)
    assert [{step for _, step in each} for each in written[2:]] == [{2, 3}]
    sizes = [len(each) for each in written]
    assert sizes[0] == sizes[2] == 2 * len(bandit(0, 0))


def test_the_fates_of_a_step_are_those_of_its_report(bandit_loop):
    found = []
    loop, _ = bandit_loop(CONFIG, account=found.extend)
    reports = run(loop)
    for report in reports:
        own = [each for each in found if each.step == report.step]
        total = sum((Counter(dict(each.tokens)) for each in own), Counter())
        account = report.prepared.account
        assert total.total() == account.captured
        assert total["trained", ""] == account.trained
        assert total["masked", "length"] == account.masked["length"] > 0
        assert total["dropped", "zero_variance"] == account.dropped["zero_variance"]
        assert {each.version for each in own} == {report.version}


def test_a_checkpoint_keeps_the_scores_of_its_fates(tmp_path):
    scores = SpanScores(
        "call", 1, 2, np.asarray([-0.5, np.nan], np.float32), np.asarray([1, np.nan], np.float32)
    )
    fates = StepFates("s", 0, 3, 1.0, {("trained", ""): 1}, (scores,))
    torch.save(fates.as_data(), tmp_path / "data")
    found = StepFates.of_data(torch.load(tmp_path / "data", weights_only=True))
    (kept,) = found.scores
    assert (kept.call_id, kept.choice, kept.version) == ("call", 1, 2)
    assert kept.logprobs.tobytes() == scores.logprobs.tobytes()
    assert kept.entropies.tobytes() == scores.entropies.tobytes()


def test_a_step_whose_every_update_was_refused_has_trained_nothing(make_episode, make_sample):
    episode = make_episode([make_sample([1, 2, 3], [1, 2])], 1.0, masked={"length": 1})
    accounts = [account_of(episode, None)]
    for updated, fates in (
        (True, {("trained", ""): 2, ("masked", "length"): 1}),
        (False, {("dropped", NO_UPDATE): 2, ("masked", "length"): 1}),
    ):
        (found,) = step_fates([episode], [(accounts, updated)], step=0, version=1, at=1.0)
        assert found.tokens == fates
        assert StepFates.of_data(orjson.loads(orjson.dumps(found.as_data()))) == found
