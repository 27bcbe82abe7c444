"""A teacher whose prompt holds more than the policy's, and one that is the policy's average."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import UsageError
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.samples.sample import Turn
from bridle.store.records import CallKind, CallStatus, Message, ToolCall
from bridle.trainer.batch.prepare import prepare
from bridle.trainer.config import (
    AdvantageConfig,
    DistillationConfig,
    GrpoConfig,
    LoraConfig,
    OptimizerConfig,
)
from bridle.trainer.credit.distillation import TeacherError, gap_of
from bridle.trainer.credit.privileged import (
    CONTEXTS,
    Attempt,
    HintOptions,
    Informer,
    Insertion,
    demonstration,
    hint,
    outcome,
)
from bridle.trainer.learner.average import Average
from bridle.trainer.learner.checkpoint import CheckpointError
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy.compute import UnsupportedCompute
from bridle.trainer.policy.model import ON_CPU, load_policy, trainable_policy

NONE = AdvantageConfig(baseline="none")
TEXT = "\nThe reward of this attempt is 1."


@pytest.fixture(scope="module")
def tokenizer(chat_directory):
    return Tokenizer(chat_directory)


def conversation(tokenizer, *turns, reply="3 + 4 = 7"):
    """The ids of a prompt, and those of a reply."""
    prompt = tokenizer.render([{"role": role, "content": text} for role, text in turns])
    return tokenizer.encode(prompt), tokenizer.encode(reply)


ASKED = (("system", "Answer."), ("user", "What is 3 + 4?"))


@pytest.fixture
def attempt(tokenizer, make_sample, make_episode):
    def make(*turns, reward=1.0, session="s", siblings=(), logprobs=-0.5, **fields):
        prompt, reply = conversation(tokenizer, *(turns or ASKED))
        trained = range(len(prompt), len(prompt) + len(reply))
        sample = make_sample(prompt + reply, trained, session=session, logprobs=logprobs)
        episode = make_episode([sample], reward, session=session)
        return Attempt(dataclasses.replace(episode, **fields), reward, tuple(siblings))

    return make


def informer(tokenizer, **settings):
    return Informer(DistillationConfig(**{"context": "outcome"} | settings), tokenizer)


def turn(*messages, reply):
    return Turn("c", CallKind.MAIN, CallStatus.COMPLETE, messages=messages, reply=reply)


# -- where the context is put ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "turns", "told"),
    [
        ("user", ASKED, (*ASKED[:1], ("user", ASKED[1][1] + TEXT))),
        ("system", ASKED, (("system", "Answer." + TEXT), *ASKED[1:])),
        (
            "user",
            (*ASKED, ("assistant", "12"), ("user", "And 4 + 3?")),
            (*ASKED, ("assistant", "12"), ("user", "And 4 + 3?" + TEXT)),
        ),
        (
            "user",
            (*ASKED, ("assistant", "12"), ("tool", "4")),
            (*ASKED, ("assistant", "12"), ("tool", "4\n</tool_response>" + TEXT)),
        ),
    ],
    ids=["user", "system", "last user", "tool"],
)
def test_the_teacher_reads_the_conversation_with_the_context_in_its_place(
    tokenizer, attempt, place, turns, told
):
    asked = attempt(*turns)
    (insertion,) = informer(tokenizer, place=place)(asked)
    seen = insertion.into(asked.episode.samples[0])
    prompt, reply = conversation(tokenizer, *told)
    expected = tokenizer.decode(prompt + reply)
    if turns[-1][0] == "tool":  # The template closes the response after its text.
        expected = expected.replace(TEXT + "\n</tool_response>", TEXT)
    assert tokenizer.decode(seen.token_ids.tolist()) == expected
    assert seen.token_ids[seen.mask].tolist() == reply


def test_the_sample_itself_is_unchanged(tokenizer, attempt):
    asked = attempt()
    (sample,) = asked.episode.samples
    before = {name: getattr(sample, name).copy() for name in ("token_ids", "mask", "logprobs")}
    (insertion,) = informer(tokenizer)(asked)
    insertion.into(sample)
    assert all((getattr(sample, name) == value).all() for name, value in before.items())
    assert Insertion().into(sample).token_ids.tolist() == sample.token_ids.tolist()


def test_a_session_whose_prompt_lacks_the_place_is_not_taught(tokenizer, attempt):
    assert informer(tokenizer, place="system")(attempt(ASKED[1])) is None
    assert informer(tokenizer)(attempt(ASKED[1])) is not None


def test_a_branch_that_trains_nothing_gets_no_context(tokenizer, attempt, make_sample):
    asked = attempt()
    samples = (*asked.episode.samples, make_sample([1, 2], []))
    both = Attempt(dataclasses.replace(asked.episode, samples=samples), 1.0)
    assert informer(tokenizer)(both)[1] == Insertion()


GEMMA = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n{% endif %}"
)


@pytest.fixture
def with_template(tmp_path):
    def make(template):
        train_tokenizer(tmp_path, ["What is 3 + 4? 7 the reward"] * 9, template=template)
        return Tokenizer(tmp_path)

    return make


@pytest.mark.parametrize(
    ("template", "place", "told"),
    [
        (GEMMA, "system", "where a system message ends .*not supported.*try distillation.place=u"),
        (BARE, "user", "where a user message ends .no markup ends it.: try distillation.place=sy"),
    ],
)
def test_a_template_without_the_place_is_refused_with_the_other(
    with_template, template, place, told
):
    with pytest.raises(UsageError, match=told):
        informer(with_template(template), place=place)


def test_a_reply_that_begins_otherwise_than_earlier_ones_has_its_place(with_template, attempt):
    tokenizer = with_template(THINKING)
    mark = informer(tokenizer)._mark
    assert mark == b"<|im_end|><|im_start|>assistant"


# -- what the context is --------------------------------------------------------------------------


def test_the_outcome_is_the_reward_by_which_sessions_are_compared(attempt):
    assert outcome(attempt(reward=1.0)) == TEXT
    assert outcome(attempt(reward=-0.25)) == "\nThe reward of this attempt is -0.25."


def test_a_hint_is_a_field_of_the_payload(tokenizer, attempt):
    asked = attempt(payload={"hint": "add", "answer": 7})
    assert hint(asked) == "\nadd"
    assert hint(attempt()) is None
    assert hint(asked, HintOptions("answer")) == "\n7"
    (insertion,) = informer(tokenizer, context="hint", options={"hint": {"field": "answer"}})(asked)
    assert tokenizer.decode(insertion.token_ids) == "\n7"


def test_a_demonstration_is_the_best_sibling_that_beats_the_worst(attempt):
    call = ToolCall("1", "add", json.dumps([3, 4]))
    turns = (
        turn(Message("user", "What?"), reply=Message("assistant", "I add.", tool_calls=(call,))),
        turn(
            Message("assistant", "I add.", tool_calls=(call,)),
            Message("tool", [{"type": "text", "text": "7"}]),
            reply=Message("assistant", "It is 7."),
        ),
    )
    good = attempt(reward=1.0, session="good", turns=turns)
    shown = "\nA successful attempt:\nassistant: I add. add [3, 4]\ntool: 7\nassistant: It is 7."
    bad = attempt(reward=0.0, session="bad")
    assert demonstration(attempt(reward=0.0, siblings=[bad, good])) == shown
    assert demonstration(attempt(reward=1.0, siblings=[bad, good])) == shown
    assert demonstration(attempt(reward=1.0, siblings=[bad])) is None, "it is worse"
    assert demonstration(attempt(reward=1.0, siblings=[good])) is None, "all are equal"
    assert demonstration(attempt(reward=0.0)) is None, "it is alone"
    unknown = attempt(reward=1.0, session="unknown")
    assert demonstration(attempt(reward=0.0, siblings=[unknown])) is None, "it has no messages"


def test_a_function_of_a_file_gets_the_session_its_reward_payload_and_siblings(
    tokenizer, attempt, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text(
        "def ids(attempt):\n"
        "    best = max(one.reward for one in attempt.siblings)\n"
        "    return [attempt.episode.payload['id'], int(best), int(attempt.reward)]\n"
    )
    stated = informer(tokenizer, context=f"{file}:ids")
    asked = attempt(reward=2.0, siblings=[attempt(reward=5.0)], payload={"id": 9})
    assert stated(asked)[0].token_ids == (9, 5, 2)
    outside = attempt(reward=2.0, siblings=[attempt(reward=5.0)], payload={"id": 10**6})
    with pytest.raises(UsageError, match=r"mine.py:ids' returned .1000000, 5, 2., which is no"):
        stated(outside)
    other = tmp_path / "other.py"
    other.write_text("def number(attempt):\n    return 0.5\ndef none(attempt):\n    return ''\n")
    with pytest.raises(
        UsageError, match=r"other.py:number' returned 0.5, which is no text: return"
    ):
        informer(tokenizer, context=f"{other}:number")(asked)
    assert informer(tokenizer, context=f"{other}:none")(asked) is None


# -- what is scored -------------------------------------------------------------------------------


def logprobs_in_float64(directory, ids):
    model = load_policy(directory, dtype="float64")
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("place", ["user", "system"])
def test_each_trained_token_is_scored_after_the_context(tokenizer, chat_directory, attempt, place):
    attempts = [
        attempt(session="a", reward=1.0),
        attempt(("system", "Answer."), ("user", "Call lookup"), session="b", reward=0.0),
    ]
    config = GrpoConfig(advantages=NONE, distillation=DistillationConfig(clip=0.0))
    prepared = prepare(
        [one.episode for one in attempts],
        0,
        config,
        teacher=Average(load_policy(chat_directory), 0.5).gaps,
        inform=informer(tokenizer, place=place),
    )
    assert len(prepared.items) == 2
    for one, item in zip(attempts, prepared.items, strict=True):
        told = outcome(one)
        system, user = ("Answer.", "What is 3 + 4?" if one.reward else "Call lookup")
        turns = (
            ("system", system + told * (place == "system")),
            ("user", user + told * (place == "user")),
        )
        (insertion,) = informer(tokenizer, place=place)(one)
        ids = insertion.into(item.sample).token_ids.tolist()
        assert tokenizer.decode(ids).startswith(tokenizer.render(_chat(turns)))
        reply = int(item.sample.mask.sum())
        expected = logprobs_in_float64(chat_directory, ids)[-reply:] + 0.5
        np.testing.assert_allclose(item.credit[item.sample.mask], expected, atol=2e-4)
        assert not item.credit[~item.sample.mask].any()
        assert item.sample.token_ids.tolist() == one.episode.samples[0].token_ids.tolist()


def _chat(turns):
    return [{"role": role, "content": text} for role, text in turns]


def test_scores_that_are_no_numbers_are_refused(make_sample):
    broken = np.asarray([np.nan], np.float32)
    with pytest.raises(TeacherError, match="the teacher scored tokens of session s with values"):
        gap_of(make_sample([1, 2], [1]), lambda ids: broken)


# -- who is left out ------------------------------------------------------------------------------


def says_one(samples):
    return [sample.mask.astype(np.float32) for sample in samples]


def without(*names):
    def inform(one):
        return None if one.episode.session.id in names else [Insertion(1, (7, 7))]

    return inform


@pytest.fixture
def group(make_sample, make_episode):
    def make(*rewards):
        return [
            make_episode([make_sample([1, 2, 3], [1, 2], session=name)], reward, session=name)
            for name, reward in zip("abc", rewards, strict=False)
        ]

    return make


def test_a_session_without_a_context_is_left_out_with_the_reason(group):
    stated = GrpoConfig(advantages=NONE)
    prepared = prepare(group(0.0, 1.0), 0, stated, teacher=says_one, inform=without("b"))
    assert [item.credit.tolist() for item in prepared.items] == [[0, 1, 1]]
    assert prepared.sessions_dropped == {"no_context": 1}
    assert (prepared.account.trained, prepared.account.dropped) == (2, {"no_context": 2})
    assert prepared.teacher_gap.without_context == 1
    nobody = prepare(group(0.0, 0.0), 0, stated, teacher=says_one, inform=without("a", "b"))
    assert (nobody.items, nobody.sessions_dropped) == ((), {"no_context": 2})


def test_its_reward_alone_trains_it_where_there_is_a_baseline(group):
    stated = GrpoConfig(advantages=AdvantageConfig("mean"))
    prepared = prepare(group(0.0, 1.0), 0, stated, teacher=says_one, inform=without("b"))
    assert [item.credit.tolist() for item in prepared.items] == [[-0.5, 0.5, 0.5], [0.5] * 3]
    assert prepared.sessions_dropped == {}


def test_siblings_are_the_other_sessions_of_the_group_that_have_a_reward(group):
    seen = {}

    def inform(one):
        seen[one.episode.session.id] = [(s.episode.session.id, s.reward) for s in one.siblings]
        return [Insertion()]

    prepare(group(0.0, 1.0, None), 0, GrpoConfig(), teacher=says_one, inform=inform)
    assert seen == {"a": [("b", 1.0)], "b": [("a", 0.0)]}


# -- the policy's average -------------------------------------------------------------------------


AVERAGED = GrpoConfig(
    steps=3,
    advantages=AdvantageConfig("mean"),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    distillation=DistillationConfig(teacher="ema", decay=0.75, coefficient=0.1),
)


@pytest.fixture
def averaged_loop(policy_directory, make_bandit, tmp_path):
    def make(config=AVERAGED, name="checkpoints"):
        model = trainable_policy(policy_directory, ON_CPU, config.lora)
        trained = TrainedPolicy(Learner(model, config), tmp_path / name)
        return GrpoLoop(config, [trained], make_bandit(model))

    return make


def weights(model):
    return {n: p.detach().double().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [0, 4])
def test_the_average_is_what_its_definition_says_after_every_step(averaged_loop, lora):
    torch.manual_seed(0)
    loop = averaged_loop(dataclasses.replace(AVERAGED, lora=LoraConfig(rank=lora)))
    expected = weights(loop.learner.model)
    differences = []

    def after(_report):
        own = weights(loop.learner.model)
        for name, tensor in expected.items():
            tensor.mul_(0.75).add_(own[name], alpha=0.25)
        for name, tensor in loop.learner.average.state().items():
            assert tensor.dtype == torch.float32
            torch.testing.assert_close(tensor.double(), expected[name], atol=1e-7, rtol=1e-6)
        differences.append(max(float((own[n] - expected[n]).abs().max()) for n in expected))

    loop.run(after)
    assert min(differences) > 1e-4


def test_weights_that_are_not_trained_are_the_policys_own(policy_directory):
    model = trainable_policy(policy_directory, ON_CPU, LoraConfig(rank=2))
    average = Average(model, 0.5)
    own = dict(average.model.named_parameters())
    for name, tensor in model.named_parameters():
        assert (own[name] is tensor) == (not tensor.requires_grad)
    assert not any(tensor.requires_grad for tensor in own.values())


@pytest.mark.parametrize(("decay", "moved"), [(0.0, True), (1.0, False)])
def test_the_ends_of_the_decay_are_the_policy_and_its_start(averaged_loop, decay, moved):
    stated = dataclasses.replace(AVERAGED.distillation, decay=decay)
    loop = averaged_loop(dataclasses.replace(AVERAGED, distillation=stated))
    before = weights(loop.learner.model)
    loop.run()
    expected = weights(loop.learner.model) if moved else before
    for name, tensor in loop.learner.average.state().items():
        assert torch.equal(tensor.double(), expected[name])


def test_the_average_scores_and_its_part_is_reported(averaged_loop):
    reports = []
    averaged_loop().run(reports.append)
    first, *_, last = [report.metrics() for report in reports]
    assert first["distillation/gap"] == pytest.approx(0.0, abs=1e-5), "it begins as the policy"
    assert last["distillation/gap"] < -1e-4
    assert last["distillation/tokens"] > 0


def test_a_resumed_run_goes_on_with_the_average_that_it_had(averaged_loop):
    torch.manual_seed(0)
    whole = averaged_loop(name="whole")
    whole.run()
    torch.manual_seed(0)
    halves = averaged_loop(name="halves")
    halves.run(lambda report: report.step == 0)
    resumed = averaged_loop(name="halves")
    resumed.resume()
    assert resumed.step == 1
    kept = halves.learner.average.state()
    for name, tensor in resumed.learner.average.state().items():
        assert torch.equal(tensor, kept[name])
    resumed.run()
    expected = whole.learner.average.state()
    for name, tensor in resumed.learner.average.state().items():
        assert torch.equal(tensor, expected[name])


def test_a_checkpoint_without_an_average_is_refused(averaged_loop):
    plain = dataclasses.replace(AVERAGED, distillation=DistillationConfig())
    averaged_loop(plain).run()
    with pytest.raises(CheckpointError, match=r"no average of this policy's weights: set distill"):
        averaged_loop().resume()


def test_a_learner_that_keeps_none_is_refused(policy_directory, tmp_path):
    learner = Learner(load_policy(policy_directory), GrpoConfig())
    with pytest.raises(ValueError, match="an average needs learners that keep one"):
        GrpoLoop(AVERAGED, [TrainedPolicy(learner, tmp_path)], lambda step, version: [])


def test_a_policy_that_is_spread_has_no_average(policy_directory, monkeypatch):
    spread = SimpleNamespace(processes=2)
    monkeypatch.setattr("bridle.trainer.learner.learner.share_of", lambda _model: spread)
    with pytest.raises(UnsupportedCompute, match=r"no average of itself: train on one with comp"):
        Learner(load_policy(policy_directory), AVERAGED)


def test_the_contexts_are_known_by_name():
    assert {"outcome", "hint", "demonstration"} == set(CONTEXTS.names())
