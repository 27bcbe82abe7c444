import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.conditions import Condition
from bridle.reconstruct.samples.builders import BUILDERS, build
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.samples.sample import Conservation
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree, SessionTree
from bridle.store.records import CallKind, CallStatus, Sampler, VersionRun


def samples_of(reader, session, rules=DEFAULT_RULES, builder="tree"):
    return build(LoadedSession.load(reader, session.id), rules, builder)


def trained(sample):
    return sample.token_ids[sample.mask].tolist()


def test_a_branch_is_the_whole_path_with_its_sampled_tokens_marked(reader, record):
    session = record()
    first = session.call([1, 2], [5, 6], version=3)
    second = session.call([1, 2, 5, 6, 7], [8], parent=first, version=4)
    (sample,) = samples_of(reader, session).samples
    assert sample.token_ids.tolist() == [1, 2, 5, 6, 7, 8]
    assert sample.mask.tolist() == [False, False, True, True, False, True]
    assert sample.versions.tolist() == [-1, -1, 3, 3, -1, 4]
    assert sample.calls.tolist() == [-1, -1, 0, 0, -1, 1]
    assert sample.call_ids == (first, second)
    assert sample.leaf_call_id == second
    assert (sample.weight, sample.kind) == (1.0, CallKind.MAIN)
    said = [reader.sampled(call)[0].logprobs for call in (first, second)]
    assert sample.logprobs[sample.calls >= 0].tobytes() == np.concatenate(said).tobytes()
    assert not sample.logprobs[sample.calls < 0].any()


def test_every_branch_of_an_agents_session_is_delivered(reader, agent):
    built = samples_of(reader, agent)
    assert [trained(sample) for sample in built.samples] == [
        [70, 71, 72],
        [50, 51, 52, 53, 54, 55],
        [56, 57],
        [58],
        [59],
    ]
    assert built.conservation == Conservation(14, 13, {}, {"kind_side": 1})
    assert sum(sample.weight for sample in built.samples) == pytest.approx(1.0)


UNSCORED = {
    None: "sampler_not_recorded",
    Sampler("processed", grammar="tool_choice"): "sampler_grammar",
    Sampler("processed", others=("logit_bias",)): "sampler_logit_bias",
    Sampler("processed", temperature=None): "sampler_unknown",
    Sampler("processed", repetition_penalty=1.1): "sampler_penalty",
    Sampler("processed", temperature=0.0): "sampler_greedy",
    Sampler("raw", top_k=64): "sampler_logprobs_raw",
    Sampler("unknown", temperature=0.7): "sampler_logprobs_raw",
}


def test_the_tokens_before_a_grammar_began_are_trained(reader, record):
    session = record()
    sampler = Sampler("processed", grammar="tool_choice", unconstrained=2)
    session.call([1], [5, 6, 7, 8], sampler=sampler)
    built = samples_of(reader, session)
    assert built.conservation == Conservation(4, 2, {"sampler_grammar": 2}, {})
    assert [trained(sample) for sample in built.samples] == [[5, 6]]


@pytest.mark.parametrize("sampler", UNSCORED, ids=UNSCORED.values())
def test_what_cannot_be_scored_at_its_sampler_is_masked_with_the_reason(reader, record, sampler):
    session = record()
    first = session.call([1], [5, 6], sampler=sampler)
    session.call([1, 5, 6, 7], [8], parent=first)
    built = samples_of(reader, session)
    assert built.conservation == Conservation(3, 1, {UNSCORED[sampler]: 2}, {})
    assert [trained(sample) for sample in built.samples] == [[8]]
    imitated = samples_of(reader, session, SampleRules(samplers="any"))
    assert imitated.conservation == Conservation(3, 3, {}, {})


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler("raw"),
        Sampler("unknown"),
        Sampler("processed", 0.7, 0.8),
        Sampler("processed", top_k=64),
    ],
)
def test_a_sample_carries_the_sampler_of_each_of_its_calls(reader, record, sampler):
    session = record()
    first = session.call([1], [5, 6], sampler=sampler)
    session.call([1, 5, 6, 7], [8], parent=first)
    (sample,) = samples_of(reader, session).samples
    assert sample.samplers == (sampler, Sampler("processed"))
    assert trained(sample) == [5, 6, 8]


def test_shared_sampled_tokens_are_context_after_their_first_branch(reader, agent):
    retry = samples_of(reader, agent).samples[2]
    assert retry.token_ids.tolist()[-6:] == [52, 53, 54, 30, 56, 57]
    assert retry.versions.tolist()[-6:] == [1, 1, 1, -1, 2, 2]
    assert retry.mask.tolist()[-6:] == [False] * 4 + [True] * 2


def test_a_branch_inside_sampled_tokens_shows_only_those_it_passed(reader, agent):
    edited = samples_of(reader, agent).samples[3]
    assert edited.token_ids.tolist() == [1, 2, 3, 10, 50, 51, 20, 52, 99, 58]
    assert edited.calls.tolist() == [-1] * 4 + [0, 0, -1, 1, -1, 2]


def test_a_call_that_only_failed_calls_continue_is_still_delivered(reader, record):
    session = record()
    first = session.call([1], [5])
    session.call([1, 5, 6], parent=first, status=CallStatus.FAILED)
    assert [trained(s) for s in samples_of(reader, session).samples] == [[5]]


def test_merged_chains_start_anew_at_a_second_continuation(reader, agent):
    built = samples_of(reader, agent, builder="merged")
    assert [trained(sample) for sample in built.samples] == [
        [70, 71, 72],
        [50, 51, 52, 53, 54, 55],
        [56, 57],
        [58],
        [59],
    ]


def test_per_call_makes_one_sample_of_each_call(reader, agent):
    built = samples_of(reader, agent, builder="per_call")
    assert len(built.samples) == 8
    assert built.conservation.trained == 13


def test_the_builders_differ_where_branches_share_a_prefix_that_is_no_whole_call(reader, record):
    session = record()
    first = session.call([1], [5, 6, 7])
    session.call([1, 5, 8], [9], parent=first)
    assert [trained(s) for s in samples_of(reader, session).samples] == [[5, 6, 7], [9]]
    for builder in BUILDERS:
        assert samples_of(reader, session, builder=builder).conservation.trained == 4


def test_both_of_two_equal_choices_are_trained(reader, record):
    session = record()
    session.call([1], [5, 6], [5, 6])
    built = samples_of(reader, session)
    assert [trained(sample) for sample in built.samples] == [[5, 6], [5, 6]]
    assert built.conservation == Conservation(4, 4, {}, {})


@pytest.mark.parametrize(
    ("rules", "conservation"),
    [
        (
            SampleRules(finish_length=False),
            Conservation(14, 12, {"finish_length": 1}, {"kind_side": 1}),
        ),
        (
            SampleRules(kinds=frozenset({CallKind.SUBAGENT})),
            Conservation(14, 3, {}, {"kind_main": 10, "kind_side": 1}),
        ),
        (
            SampleRules(oldest_version=2),
            Conservation(14, 8, {"version_stale": 5}, {"kind_side": 1}),
        ),
        (
            SampleRules(untrusted_versions=frozenset({1, 3})),
            Conservation(14, 6, {"version_untrusted": 5}, {"kind_side": 1, "version_untrusted": 2}),
        ),
        (SampleRules(models=frozenset({"other"})), Conservation(14, 0, {}, None)),
    ],
)
def test_tokens_that_the_rules_exclude_are_named_and_counted(reader, agent, rules, conservation):
    built = samples_of(reader, agent, rules).conservation
    assert built.balanced
    assert (built.captured, built.trained) == (conservation.captured, conservation.trained)
    assert built.masked == conservation.masked
    if conservation.dropped is not None:
        assert built.dropped == conservation.dropped


def test_a_call_that_was_cut_is_context_unless_asked_for(reader, record):
    session = record()
    cut = session.call([1], [5, 6], status=CallStatus.PARTIAL, usage={})
    session.call([1, 5, 6, 7], [8], parent=cut)
    built = samples_of(reader, session)
    assert trained(built.samples[0]) == [8]
    assert built.conservation == Conservation(3, 1, {"partial": 2}, {})
    allowed = samples_of(reader, session, SampleRules(partial=True))
    assert trained(allowed.samples[0]) == [5, 6, 8]


def test_quarantined_tokens_are_never_trained(reader, record):
    session = record()
    bad = session.call([1], [5, 6], usage={"prompt_tokens": 1, "completion_tokens": 3})
    session.call([1, 5, 6, 7], [8], parent=bad)
    built = samples_of(reader, session, SampleRules(partial=True))
    assert built.conservation == Conservation(3, 1, {"quarantined": 2}, {})


def test_sampled_tokens_without_a_prompt_are_dropped_by_name(reader, record):
    session = record()
    session.call([1], [5, 6], prompt_token_ids=None)
    assert samples_of(reader, session).conservation == Conservation(2, 0, {}, {"prompt_unknown": 2})


def test_a_reply_that_spans_two_policies_is_trained_by_token(reader, record):
    session = record()
    session.call([1], [5, 6, 7, 8])
    loaded = LoadedSession.load(reader, session.id)
    (row,) = loaded.tree.sampled()
    structs.force_setattr(row.span, "versions", (VersionRun(0, 1), VersionRun(3, 2)))
    built = build(loaded, SampleRules(oldest_version=2))
    assert trained(built.samples[0]) == [8]
    assert built.samples[0].versions.tolist() == [-1, 1, 1, 1, 2]
    assert built.conservation == Conservation(4, 1, {"version_stale": 3}, {})


def test_an_empty_session_has_no_samples(reader, record):
    built = samples_of(reader, record())
    assert (built.samples, built.conservation) == ((), Conservation(0, 0, {}, {}))


def test_rules_are_data():
    rules = SampleRules(
        kinds=frozenset({CallKind.MAIN}),
        models=frozenset({"m"}),
        where=(Condition.parse("call.dialect=chat"),),
        turn_reward="step",
    )
    assert SampleRules.from_data(rules.as_data()) == rules
    assert SampleRules.from_data({}) == DEFAULT_RULES
    with pytest.raises(TypeError):
        SampleRules.from_data({"colour": "red"})


def test_a_missing_span_breaks_the_tree(reader, agent):
    calls, rows = (found[agent.id] for found in reader.recorded_of([agent.id]))
    for missing in rows:
        if any(row.span.parent_id == missing.span.id for row in rows):
            with pytest.raises(BrokenTree):
                SessionTree(agent.id, calls, [row for row in rows if row is not missing])


tokens = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def plans(draw):
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        prompt, parent = draw(tokens), None
        if calls and draw(st.booleans()):
            parent = draw(st.integers(0, len(calls) - 1))
            history = calls[parent][0] + draw(st.sampled_from(calls[parent][1]))
            prompt = history[: draw(st.integers(0, len(history)))] + prompt
        kind = draw(st.sampled_from([CallKind.MAIN, CallKind.MAIN, CallKind.SIDE]))
        status = draw(st.sampled_from([CallStatus.COMPLETE] * 3 + [CallStatus.PARTIAL]))
        sampled = draw(st.lists(tokens, min_size=1, max_size=2))
        calls.append((prompt or [0], sampled, parent, kind, status))
    return calls


@given(plan=plans())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_are_conserved_whatever_the_session_looks_like(reader, record, plan):
    session, ids = record(), []
    for prompt, sampled, parent, kind, status in plan:
        hint = None if parent is None else ids[parent]
        ids.append(session.call(prompt, *sampled, parent=hint, kind=kind, status=status))
    captured = sum(len(reply) for call in plan for reply in call[1])
    allowed = sum(
        len(reply)
        for _, replies, _, kind, status in plan
        for reply in replies
        if kind is CallKind.MAIN and status is CallStatus.COMPLETE
    )
    for builder in BUILDERS:
        built = samples_of(reader, session, builder=builder)
        assert built.conservation.captured == captured
        assert built.conservation.trained == allowed
        assert built.conservation.balanced
        assert "not_delivered" not in built.conservation.dropped
        if built.samples:
            assert sum(s.weight for s in built.samples) == pytest.approx(1.0)
        assert audit_session(reader, session.id, builder=builder).violations == ()
