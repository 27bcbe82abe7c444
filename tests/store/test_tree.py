import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.store.records import Choice, Span, SpanKind, VersionRun
from bridle.store.tree import (
    DETACHED,
    TokenTree,
    common_prefix,
    parents_first,
    parting,
    path_ids,
)


def ids(*values):
    return np.array(values, dtype=np.uint32)


def choice(tokens):
    tokens = np.array(tokens, dtype=np.uint32)
    return Choice(tokens, np.zeros(len(tokens), np.float32), (VersionRun(0, 1),), "stop")


def add(tree, call, prompt, *sampled, parent=None):
    near = tree.nodes.get(f"{parent}.s0")
    if near is not None and not len(near.token_ids):
        near = None
    return tree.grow(call, ids(*prompt), [choice(tokens) for tokens in sampled], near)


tokens = st.lists(st.integers(0, 2), max_size=5)


class Trie:
    """The reference: every distinct position once."""

    def __init__(self):
        self.root = {}

    def add(self, path):
        node, new = self.root, 0
        for token in path:
            if token not in node:
                node[token] = {}
                new += 1
            node = node[token]
        return new


@st.composite
def histories(draw):
    """``(call, parent hint, prompt, choices)``; hints may be right, wrong or unknown."""
    calls = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(tokens)
        if calls and draw(st.booleans()):
            _, _, said, sampled = draw(st.sampled_from(calls))
            history = said + (draw(st.sampled_from(sampled)) if sampled else [])
            prompt = history[: draw(st.integers(0, len(history)))] + prompt
        hint = draw(st.sampled_from([None, "unknown", *(call[0] for call in calls)]))
        calls.append((f"c{number}", hint, prompt, draw(st.lists(tokens, max_size=2))))
    return calls


def grow(calls, hinted):
    tree, spans, growths = TokenTree("s"), [], {}
    for call, hint, prompt, sampled in calls:
        growth = add(tree, call, prompt, *sampled, parent=hint if hinted else None)
        spans.extend(growth.spans)
        growths[call] = growth
    return tree, spans, growths


@given(histories(), st.booleans())
@settings(max_examples=300)
def test_every_calls_path_is_exactly_its_tokens(calls, hinted):
    grown, spans, growths = grow(calls, hinted)
    reloaded = TokenTree("s", reversed(spans))
    for call, _, prompt, sampled in calls:
        for tree in (grown, reloaded):
            path = tree.path(growths[call].prompt_span_id, len(prompt))
            assert path.tolist() == prompt
            for index, reply in enumerate(sampled):
                end = len(prompt) + len(reply)
                assert tree.path(f"{call}.s{index}", end).tolist() == prompt + reply


@given(histories())
@settings(max_examples=300)
def test_observed_tokens_are_stored_only_where_no_path_has_them(calls):
    trie, expected = Trie(), 0
    for _, _, prompt, sampled in calls:
        expected += trie.add(prompt)
        for reply in sampled:
            expected += len(reply)
            trie.add(prompt + reply)
    tree, spans, _ = grow(calls, hinted=False)
    assert sum(len(span.token_ids) for span in spans) == expected == tree.tokens


@given(histories(), st.booleans())
def test_spans_hang_inside_their_parents(calls, hinted):
    _, spans, _ = grow(calls, hinted)
    by_id = {span.id: span for span in spans}
    for span in spans:
        if span.parent_id is None:
            assert span.start == 0
        else:
            parent = by_id[span.parent_id]
            assert parent.start < span.start <= parent.end


@given(histories(), st.booleans(), st.data())
def test_two_paths_part_where_their_tokens_do(calls, hinted, data):
    tree, _, growths = grow(calls, hinted)
    tip = data.draw(st.sampled_from([*tree.nodes.values()]))
    for call, _, prompt, _ in calls:
        node = tree.nodes[growths[call].prompt_span_id]
        path = path_ids(tip, tip.end)
        assert parting(node, len(prompt), tip) == common_prefix(ids(*prompt), path)
        first = data.draw(st.integers(0, len(prompt)))
        assert path_ids(node, len(prompt), first=first).tolist() == prompt[first:]


def test_a_continuation_hangs_on_the_reply_of_its_parent():
    tree = TokenTree("s")
    add(tree, "a", [1, 2], [5, 6])
    add(tree, "b", [1, 2], [5, 6])
    growth = add(tree, "c", [1, 2, 5, 6, 7], parent="b")
    assert [(span.parent_id, span.start) for span in growth.spans] == [("b.s0", 4)]


def test_a_continuation_of_the_second_choice_is_found():
    tree = TokenTree("s")
    add(tree, "a", [1], [5], [6])
    growth = add(tree, "b", [1, 6, 7], parent="a")
    assert growth.spans[0].parent_id == "a.s1"


def test_where_a_prompt_leaves_the_path_that_it_continues_is_reported():
    tree = TokenTree("s")
    add(tree, "a", [1, 2, 3], [5, 6])
    growth = tree.grow("b", ids(1, 2, 9), [], tree.nodes.get("a.s0"))
    assert growth.shared == 2
    assert [(span.parent_id, span.start) for span in growth.spans] == [("a.o", 2)]


def test_a_prompt_whose_beginning_is_known_is_not_compared(monkeypatch):
    tree, prompt = TokenTree("s"), ids(*range(10))
    for turn in range(200):
        add(tree, f"c{turn}", prompt.tolist(), [turn], parent=f"c{turn - 1}")
        prompt = np.concatenate([prompt, ids(turn, 7)])
    near = tree.nodes.get("c199.s0")
    monkeypatch.setattr("bridle.store.tree.common_prefix", None)
    point, shared = tree.find(prompt, near, known=len(prompt))
    assert (point.node, point.position, shared) == (near, near.end, near.end)


def test_a_call_that_nothing_hangs_on_can_be_dropped():
    tree = TokenTree("s")
    add(tree, "a", [1, 2], [5])
    add(tree, "b", [1, 2, 5, 3], [6], [7])
    tree.drop("a")
    assert tree.tokens == 6
    tree.drop("b")
    assert (tree.tokens, len(tree.nodes)) == (3, 3)
    growth = add(tree, "c", [1, 2, 5, 3], parent="b")
    assert [(span.parent_id, span.start) for span in growth.spans] == [("a.s0", 3)]


def test_a_stored_span_does_not_keep_the_whole_prompt_in_memory():
    tree = TokenTree("s")
    add(tree, "a", range(1000))
    growth = add(tree, "b", [*range(1000), 5], parent="a")
    assert growth.spans[0].token_ids.base is None


def test_sampled_tokens_without_a_known_prompt_stay_outside_the_tree():
    tree = TokenTree("s")
    growth = tree.grow("a", None, [choice([5])])
    assert growth.spans[0].start == DETACHED
    assert growth.prompt_span_id is None
    assert tree.find(ids(5))[0].position == 0


def test_a_path_longer_than_recorded_is_an_error():
    tree = TokenTree("s")
    add(tree, "a", [1, 2])
    with pytest.raises(ValueError, match="has 2 tokens, not 3"):
        tree.path("a.o", 3)


def test_spans_without_their_parent_are_an_error():
    orphan = Span("b.o", "s", "b", "a.o", 1, SpanKind.OBSERVED, ids(1))
    with pytest.raises(ValueError, match=r"missing parents: a\.o"):
        parents_first([orphan])


@given(tokens, tokens)
def test_common_prefix_agrees_with_counting(left, right):
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(ids(*left), ids(*right)) == expected
