"""A teacher scores the policy's own samples, and what it says becomes credit."""

import dataclasses
import shutil
import socket

import numpy as np
import pytest
import torch

from bridle.engine.embedded.engine import EmbeddedEngine
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import (
    AdvantageConfig,
    DistillationConfig,
    GrpoConfig,
    OptimizerConfig,
    PackingConfig,
)
from bridle.trainer.credit.distillation import (
    Teacher,
    TeacherError,
    TeacherGap,
    TeacherUnreachable,
    taught,
)
from bridle.trainer.learner.checkpoint import checkpoints
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.model import ON_CPU, load_policy, save_policy, trainable_policy

KEY = "a-key"
NONE = AdvantageConfig(baseline="none")


@pytest.fixture(scope="module")
def teacher_directory(chat_directory, tmp_path_factory):
    """Other weights than the policy's, and surer of themselves, with the same tokenizer."""
    directory = tmp_path_factory.mktemp("teacher")
    shutil.copytree(chat_directory, directory, dirs_exist_ok=True)
    shape = TinyShape(hidden=32, layers=2, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=vocabulary(chat_directory), seed=7)
    model = load_policy(directory)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    save_policy(model, directory, chat_directory)
    return directory


@pytest.fixture(scope="module")
def engine(teacher_directory):
    with EmbeddedEngine(teacher_directory, api_key=KEY) as engine:
        yield engine


@pytest.fixture
def teacher(engine):
    with Teacher(DistillationConfig(url=engine.base_url, parallel=3), api_key=KEY) as teacher:
        yield teacher


def vocabulary(directory):
    return load_policy(directory).config.vocab_size


def logprobs_in_float64(directory, ids):
    """``float64[T]``: the logprob of each id given those before it, 0 for the first."""
    model = load_policy(directory, dtype="float64")
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    scores = rows[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    return np.concatenate([[0.0], scores.numpy()])


# -- what the teacher says ------------------------------------------------------------------------


def test_the_difference_of_each_trained_token_is_that_of_a_float64_reference(
    teacher, teacher_directory, make_sample
):
    random = np.random.default_rng(0)
    samples, expected = [], []
    for number in range(7):
        ids = random.integers(0, 300, 12 + number).tolist()
        trained = sorted(random.choice(np.arange(1, len(ids)), 5, replace=False).tolist())
        recorded = -random.random(5)
        samples.append(make_sample(ids, trained, session=f"s{number}", logprobs=recorded))
        gap = np.zeros(len(ids))
        gap[trained] = logprobs_in_float64(teacher_directory, ids)[trained] - recorded
        expected.append(gap)
    found = teacher.gaps(samples)
    for sample, gap, reference in zip(samples, found, expected, strict=True):
        assert gap.dtype == np.float32
        np.testing.assert_allclose(gap, reference, atol=2e-4)
        assert not gap[~sample.mask].any()


def test_a_sample_that_trains_nothing_is_not_asked_about(teacher, make_sample):
    beyond = 10**6
    (gap,) = teacher.gaps([make_sample([1, 2, beyond], [])])
    assert gap.tolist() == [0, 0, 0]
    (gap,) = teacher.gaps([make_sample([1, 2, beyond], [1])])
    assert gap[1] != 0, "what comes after the last trained token is not sent"


def test_the_part_is_scaled_bounded_and_added_and_nan_stays_nan():
    credit = np.asarray([0.5, 0.5, -1.0, np.nan], np.float32)
    gap = np.asarray([0.25, 9.0, -9.0, 1.0], np.float32)
    stated = DistillationConfig(coefficient=2.0, clip=3.0)
    assert taught(credit, gap, stated)[:3].tolist() == [1.0, 6.5, -7.0]
    assert np.isnan(taught(credit, gap, stated)[3])
    unbounded = dataclasses.replace(stated, clip=0.0)
    assert taught(credit, gap, unbounded)[:3].tolist() == [1.0, 18.5, -19.0]
    assert TeacherGap.of(gap, stated) == TeacherGap(4, 0.3125, 0.5)
    assert TeacherGap.of(gap, unbounded).clipped == 0


# -- what is prepared -----------------------------------------------------------------------------


@pytest.fixture
def small_group(make_sample, make_episode):
    def make(rewards=(1.0, 1.0)):
        return [
            make_episode([make_sample([1, 2, n], [1, 2], session=name)], reward, session=name)
            for n, (name, reward) in enumerate(zip("abcdef", rewards, strict=False))
        ]

    return make


def agrees(samples):
    """A teacher that finds each token as likely as the policy did."""
    return [np.zeros(len(sample.token_ids), np.float32) for sample in samples]


def says(*gap):
    """A teacher that says the same of every sample."""
    return lambda samples: [np.asarray(gap, np.float32) for _ in samples]


def test_a_group_of_equal_rewards_is_trained_with_a_teacher_and_not_without(small_group):
    config = GrpoConfig()
    without = prepare(small_group(), 0, config)
    assert (without.items, without.degenerate_groups, without.teacher_gap) == ((), 1, None)
    prepared = prepare(small_group(), 0, config, teacher=says(0, 0.5, -0.25))
    assert [item.credit.tolist() for item in prepared.items] == [[0, 0.5, -0.25]] * 2
    assert (prepared.degenerate_groups, prepared.account.trained) == (0, 4)
    assert prepared.teacher_gap == TeacherGap(4, 0.125, 0.0)
    agreeing = prepare(small_group(), 0, config, teacher=agrees)
    assert agreeing.account.dropped == {"zero_variance": 4}


def test_the_estimators_advantage_and_the_teachers_part_add_up(small_group):
    config = GrpoConfig(advantages=AdvantageConfig(baseline="mean"))
    prepared = prepare(small_group((1.0, 0.0)), 0, config, teacher=says(0, 0.25, 0))
    first, second = (item.credit.tolist() for item in prepared.items)
    assert (first, second) == ([0.5, 0.75, 0.5], [-0.5, -0.25, -0.5])


def test_without_a_baseline_rewards_count_for_nothing(small_group):
    config = GrpoConfig(advantages=NONE)
    assert prepare(small_group((1.0, 0.0)), 0, config).items == ()
    taught_alone = [
        [item.credit.tolist() for item in prepare(group, 0, config, teacher=says(0, 1, 2)).items]
        for group in (small_group((1.0, 0.0)), small_group((-3.0, 8.0)))
    ]
    assert taught_alone == [[[0, 1, 2]] * 2] * 2


def test_a_token_without_a_baseline_stays_masked(small_group):
    first, *others = small_group((1.0, 0.0, 0.5))
    alone = dataclasses.replace(first.samples[0], role="planner")
    group = [dataclasses.replace(first, samples=(alone,)), *others]
    config = GrpoConfig(advantages=AdvantageConfig(baseline="per_role"))
    prepared = prepare(group, 0, config, teacher=says(0, 1, 1))
    assert prepared.account.masked == {"no_baseline": 2}
    assert all(np.isfinite(item.credit[item.sample.mask]).all() for item in prepared.items)


def test_no_teacher_is_asked_about_a_session_that_is_left_out(make_sample, make_episode):
    def session(name, **fields):
        sample = make_sample([1, 2, 3], [2], session=name, version=fields.pop("version", 5))
        return make_episode([sample], 1.0, session=name, **fields)

    asked = []

    def teacher(samples):
        asked.extend(sample.session_id for sample in samples)
        return says(0, 0, 1)(samples)

    group = [session("new"), session("old", version=1), session("late", outcome="timeout")]
    prepared = prepare([*group, session("unrewarded")], 5, GrpoConfig(), teacher=teacher)
    assert asked == ["new", "unrewarded"]
    assert prepared.teacher_gap is not None
    assert prepared.teacher_gap.tokens == 2


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.fixture
def nobody():
    """The URL of a port at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_a_teacher_that_is_not_there_is_named_with_its_url(nobody, make_sample):
    with Teacher(DistillationConfig(url=nobody)) as teacher:
        with pytest.raises(TeacherUnreachable, match=f"the teacher at {nobody} does not answer"):
            teacher.served()
        with pytest.raises(TeacherUnreachable, match="Start it, or name another"):
            teacher.gaps([make_sample([1, 2], [1])])
    assert TeacherUnreachable.retryable
    assert not TeacherError.retryable


def test_a_teacher_with_fewer_ids_is_refused_by_tokenizer(teacher, engine, make_sample):
    unknown = engine.backend.vocab_size
    samples = [make_sample([1, 2, 3], [2]), make_sample([1, unknown, 3], [2], session="odd")]
    told = (
        f"session odd: .*{unknown} is out of vocabulary.*the policy's tokenizer, with id {unknown}"
    )
    with pytest.raises(TeacherError, match=told):
        teacher.gaps(samples)


def test_a_sample_that_is_longer_than_the_teachers_context_names_the_context(teacher, make_sample):
    with pytest.raises(TeacherError, match="a context of 601 tokens or more"):
        teacher.gaps([make_sample([1] * 600, [599])])


@pytest.mark.parametrize(
    ("change", "key", "told"),
    [
        ({}, None, r"401.*distillation\.key_variable"),
        ({"model": "another"}, KEY, r"404.*without /v1, distillation\.model its name"),
        ({"suffix": "/v1"}, KEY, r"404.*distillation\.url is its base URL, without /v1"),
    ],
    ids=["key", "model", "path"],
)
def test_a_refusal_names_the_setting_that_is_wrong(engine, make_sample, change, key, told):
    settings = {"url": engine.base_url} | change
    settings["url"] += settings.pop("suffix", "")
    config = DistillationConfig(**settings)
    with Teacher(config, api_key=key) as teacher, pytest.raises(TeacherError, match=told):
        teacher.gaps([make_sample([1, 2], [1])])


def test_scores_that_are_no_numbers_are_refused(teacher, make_sample, monkeypatch):
    broken = np.asarray([np.nan], np.float32)
    monkeypatch.setattr(teacher._engine, "score", lambda ids, model: broken)
    with pytest.raises(TeacherError, match="session s with values that are not finite"):
        teacher.gaps([make_sample([1, 2], [1])])


# -- what is learned ------------------------------------------------------------------------------


CONFIG = GrpoConfig(
    steps=12,
    advantages=NONE,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    packing=PackingConfig(max_tokens=128, block_tokens=16),
)


@pytest.fixture
def loop(chat_directory, make_bandit, tmp_path):
    def make(teacher, config=CONFIG, directory=tmp_path / "checkpoints"):
        model = trainable_policy(chat_directory, ON_CPU, config.lora)
        learner, collect = Learner(model, config), make_bandit(model)
        return GrpoLoop(config, [TrainedPolicy(learner, directory)], collect, teacher=teacher)

    return make


@torch.no_grad()
def divergence(model, teacher, prompts):
    """KL(π || π_T) in nats at the prompts' next token, in float64."""
    found = []
    for prompt in prompts:
        own, other = (
            each(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
            for each in (model, teacher)
        )
        found.append(float((own.exp() * (own - other)).sum()))
    return np.mean(found)


def test_a_policy_moves_towards_a_teacher_that_learned_from_rewards(
    loop, make_bandit, chat_directory, tmp_path
):
    torch.manual_seed(0)
    rewarded = loop(None, dataclasses.replace(CONFIG, advantages=AdvantageConfig()))
    rewarded.run()
    save_policy(rewarded.learner.model, tmp_path / "teacher", chat_directory)
    reports = []
    with (
        EmbeddedEngine(tmp_path / "teacher") as engine,
        Teacher(DistillationConfig(url=engine.base_url)) as teacher,
    ):
        learned = loop(teacher.gaps, CONFIG, tmp_path / "learned")
        bandit = make_bandit(learned.learner.model)
        before = divergence(learned.learner.model, rewarded.learner.model, bandit.prompts)
        learned.run(reports.append)
    after = divergence(learned.learner.model, rewarded.learner.model, bandit.prompts)
    assert after < before / 2
    first, last = reports[0].metrics(), reports[-1].metrics()
    assert first["distillation/tokens"] == len(bandit.prompts) * bandit.sessions * bandit.sampled
    assert first["distillation/gap"] < last["distillation/gap"] < 0
    assert 0 <= first["distillation/clip_fraction"] < 1


def test_a_teacher_that_agrees_changes_no_bit(loop, tmp_path):
    config = dataclasses.replace(CONFIG, steps=3, advantages=AdvantageConfig())
    weights = []
    for name, teacher in (("without", None), ("agreeing", agrees)):
        torch.manual_seed(0)
        learned = loop(teacher, config, tmp_path / name)
        learned.run()
        weights.append(learned.learner.tensors())
    without, agreeing = weights
    assert all(torch.equal(tensor, agreeing[name]) for name, tensor in without.items())


def test_a_step_whose_teacher_fails_is_not_begun_and_is_taken_again(
    loop, teacher, nobody, tmp_path
):
    config = dataclasses.replace(CONFIG, steps=2)
    lost = Teacher(DistillationConfig(url=nobody))
    answering = iter([teacher.gaps, lost.gaps])
    learned = loop(lambda samples: next(answering)(samples), config)
    with pytest.raises(TeacherUnreachable):
        learned.run()
    assert learned.step == 1
    assert len(checkpoints(tmp_path / "checkpoints")) == 1
    interrupted = {name: each.clone() for name, each in learned.learner.tensors().items()}
    again = loop(teacher.gaps, config)
    again.resume()
    kept = again.learner.tensors()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in interrupted.items())
    again.run()
    assert again.step == 2
