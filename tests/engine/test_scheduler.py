"""Continuous batching, measured in steps and tokens: who computes what, and that it is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.engine.embedded.kv import PrefixCache, SequenceKV
from bridle.engine.embedded.model import PackedModel, UnservableModel, WeightsMismatch, load_state
from bridle.engine.embedded.scheduler import Generation, Scheduler, SchedulerLimits
from bridle.engine.serve.backend import Prompt, SampledToken, SamplingParams

Ids = Callable[[int, int], list[int]]
Reference = Callable[[list[int]], torch.Tensor]
EXACT = 1e-4


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def model(tiny_dir: Path) -> PackedModel:
    return PackedModel(tiny_dir, device="cpu", dtype=torch.float32)


def generation(ids: list[int], count: int, **sampling: Any) -> Generation:
    fields = {"max_tokens": count, "ignore_eos": True, "seed": len(ids), **sampling}
    return Generation(Prompt(ids), SamplingParams(**fields))


def scheduler(model: PackedModel, **limits: Any) -> Scheduler:
    return Scheduler(model, frozenset([2]), SchedulerLimits(**limits))


def drain(run: Scheduler) -> dict[Generation, list[SampledToken]]:
    tokens: dict[Generation, list[SampledToken]] = {}
    while run.busy:
        for outcome in run.step():
            if outcome.token is not None:
                tokens.setdefault(outcome.sequence, []).append(outcome.token)
    return tokens


def gap(one: Generation, tokens: list[SampledToken], reference: Reference) -> float:
    """Largest difference from a plain forward pass over the whole sequence."""
    start = len(one.prompt.token_ids)
    logprobs = reference([*one.prompt.token_ids, *(token.id for token in tokens)])
    expected = torch.stack([logprobs[start + at - 1, token.id] for at, token in enumerate(tokens)])
    return float((expected - torch.tensor([token.logprob for token in tokens])).abs().max())


@pytest.mark.parametrize("step_tokens", [1, 7, 64, 512])
def test_batched_logprobs_equal_a_plain_forward_pass(
    model: PackedModel, reference: Reference, random_ids: Ids, step_tokens: int
) -> None:
    run = scheduler(model, step_tokens=step_tokens)
    group = [generation(random_ids(seed, 3 + 17 * seed), 12 + seed) for seed in range(6)]
    for one in group:
        run.add(one)
    tokens = drain(run)
    assert all(len(tokens[one]) == one.sampling.max_tokens for one in group)
    assert max(gap(one, tokens[one], reference) for one in group) < EXACT


def test_sequences_join_and_leave_between_steps(
    model: PackedModel, reference: Reference, random_ids: Ids
) -> None:
    run = scheduler(model)
    early, late = generation(random_ids(1, 30), 20), generation(random_ids(2, 40), 5)
    run.add(early)
    tokens: dict[Generation, list[SampledToken]] = {early: [], late: []}
    for step in range(40):
        if step == 6:
            run.add(late)
        for outcome in run.step():
            assert outcome.token is not None
            tokens[outcome.sequence].append(outcome.token)
    assert len(tokens[early]) == 20
    assert len(tokens[late]) == 5
    assert run.steps == 20, "the late one rode along in the steps of the early one"
    assert max(gap(one, tokens[one], reference) for one in (early, late)) < EXACT


def test_a_seeded_sequence_does_not_depend_on_its_neighbours(
    model: PackedModel, random_ids: Ids
) -> None:
    def tokens_of(neighbours: int) -> list[int]:
        run = scheduler(model)
        one = generation(random_ids(5, 25), 16, seed=9)
        run.add(one)
        for index in range(neighbours):
            run.add(generation(random_ids(10 + index, 10 + index), 16))
        return [token.id for token in drain(run)[one]]

    assert tokens_of(0) == tokens_of(5)


def test_a_long_prompt_does_not_stall_decoding_sequences(
    model: PackedModel, random_ids: Ids
) -> None:
    run = scheduler(model, step_tokens=32)
    short = generation(random_ids(1, 10), 60)
    run.add(short)
    run.step()
    run.add(generation(random_ids(2, 900), 1))
    while any(one is not short and one.pending > 1 for one in run.running) or run.waiting:
        before = run.computed_tokens
        outcomes = run.step()
        assert any(outcome.sequence is short for outcome in outcomes)
        assert run.computed_tokens - before <= 32
    assert run.steps >= 900 // 32


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(
    model: PackedModel, random_ids: Ids
) -> None:
    run = scheduler(model, step_tokens=64)
    run.add(generation(random_ids(1, 1500), 1))
    run.step()
    short = generation(random_ids(2, 40), 1)
    run.add(short)
    steps = 0
    while short in run.running or short in run.waiting:
        run.step()
        steps += 1
    assert steps <= 3
    assert run.busy, "the long prompt is still being computed"


def test_the_next_turn_computes_only_its_new_tokens(
    model: PackedModel, reference: Reference, random_ids: Ids
) -> None:
    run = scheduler(model)
    first = generation(random_ids(1, 300), 20)
    run.add(first)
    said = drain(run)[first]
    history = [*first.prompt.token_ids, *(token.id for token in said)]
    second = generation([*history, *random_ids(3, 25)], 4)
    before = run.computed_tokens
    run.add(second)
    tokens = drain(run)[second]
    # The last sampled token was never computed; then the tail, and what is sampled but the last.
    assert run.computed_tokens - before == 1 + 25 + 4 - 1
    assert second.cached_tokens == len(history) - 1
    assert gap(second, tokens, reference) < EXACT


def test_a_branch_copies_what_it_shares_and_leaves_the_rest_for_others(
    model: PackedModel, reference: Reference, random_ids: Ids
) -> None:
    run = scheduler(model)
    stem = random_ids(1, 200)
    run.add(generation([*stem, *random_ids(2, 50)], 1))
    drain(run)
    for seed in (3, 4):
        branch = generation([*stem[:150], stem[150] + seed, *random_ids(seed, 30)], 3)
        run.add(branch)
        tokens = drain(run)[branch]
        assert branch.cached_tokens == 150
        assert gap(branch, tokens, reference) < EXACT
    again = generation([*stem, *random_ids(2, 50), 7], 1)
    run.add(again)
    drain(run)
    assert again.cached_tokens == 250


def test_prompts_of_one_group_that_come_together_are_computed_once(
    model: PackedModel, reference: Reference, random_ids: Ids
) -> None:
    run = scheduler(model, step_tokens=128)
    stem = random_ids(1, 400)
    group = [generation([*stem, 10 + index], 3) for index in range(6)]
    for one in group:
        run.add(one)
    tokens = drain(run)
    assert run.computed_tokens < 400 + 6 * (1 + 3) + 50
    assert max(gap(one, tokens[one], reference) for one in group) < EXACT


def test_those_who_wait_for_a_prefix_go_on_when_its_sequence_is_removed(
    model: PackedModel, random_ids: Ids
) -> None:
    run = scheduler(model, step_tokens=32)
    stem = random_ids(1, 400)
    leader, follower = generation(stem, 2), generation([*stem, 9], 2)
    run.add(leader)
    run.add(follower)
    run.step()
    assert follower in run.waiting
    run.remove(leader)
    assert len(drain(run)[follower]) == 2
    assert follower.cached_tokens == 32


def test_a_removed_sequence_frees_its_place_at_once(model: PackedModel, random_ids: Ids) -> None:
    run = scheduler(model, max_running=1)
    first, second = generation(random_ids(1, 20), 500), generation(random_ids(2, 20), 2)
    run.add(first)
    run.add(second)
    run.step()
    assert run.running == [first]
    run.remove(first)
    assert len(drain(run)[second]) == 2


def test_prompt_logprobs_equal_a_plain_forward_pass(
    model: PackedModel, reference: Reference, random_ids: Ids
) -> None:
    run = scheduler(model, step_tokens=50)
    ids = random_ids(1, 180)
    for _ in range(2):  # The second time, a cached prefix must not swallow the scores.
        one = generation(ids, 1, prompt_logprobs=2)
        run.add(generation(random_ids(2, 10), 5))
        run.add(one)
        drain(run)
        assert one.scores is not None
        assert one.scores[0] is None
        scores = [score for score in one.scores if score is not None]
        expected = reference(ids)
        found = torch.tensor([score.logprob for score in scores])
        wanted = expected[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert float((found - wanted).abs().max()) < EXACT
        assert [score.id for score in scores] == ids[1:]
        top = expected[0].topk(2)
        assert [token_id for token_id, _ in scores[0].top] == top.indices.tolist()
        assert scores[0].rank == int((expected[0] > expected[0, ids[1]]).sum()) + 1


def test_new_weights_change_the_logprobs_and_empty_the_cache(
    model: PackedModel, other_dir: Path, reference_of: Any, random_ids: Ids
) -> None:
    run = scheduler(model)
    ids = random_ids(1, 60)
    run.add(generation(ids, 4))
    drain(run)
    assert len(run.cache) == 1
    model.load_weights(load_state(other_dir, torch.float32))
    run.new_version()
    assert len(run.cache) == 0
    after = generation(ids, 4)
    run.add(after)
    tokens = drain(run)[after]
    assert after.cached_tokens == 0
    assert gap(after, tokens, reference_of(other_dir)) < EXACT


def test_what_an_old_version_computed_is_not_kept_after_a_change_of_weights(
    model: PackedModel, random_ids: Ids
) -> None:
    run = scheduler(model)
    one = generation(random_ids(1, 60), 8)
    run.add(one)
    run.step()
    run.new_version()
    drain(run)
    assert len(run.cache) == 0


def test_weights_that_do_not_fit_change_nothing(
    model: PackedModel, reference: Reference, random_ids: Ids
) -> None:
    state = {name: tensor.clone() for name, tensor in model.weights().items()}
    name = next(iter(state))
    for broken in (
        {**state, "another.weight": torch.zeros(2)},
        {**state, name: torch.zeros(3, 3)},
        {key: tensor + 1 for key, tensor in list(state.items())[1:4]},
    ):
        with pytest.raises(WeightsMismatch):
            model.load_weights(broken)
    run = scheduler(model)
    one = generation(random_ids(1, 20), 4)
    run.add(one)
    assert gap(one, drain(run)[one], reference) < EXACT


def test_kept_sequences_stay_within_the_memory_bound(model: PackedModel, random_ids: Ids) -> None:
    run = scheduler(model)
    run.add(generation(random_ids(0, 100), 1))
    drain(run)
    per_sequence = run.cache.nbytes
    run = scheduler(model, kv_bytes=int(per_sequence * 2.5))
    for seed in range(6):
        run.add(generation(random_ids(seed, 100), 1))
        drain(run)
        assert run.cache.nbytes <= per_sequence * 2.5
    assert len(run.cache) == 2
    newest = generation([*random_ids(5, 100), 7], 1)
    run.add(newest)
    drain(run)
    assert newest.cached_tokens == 100


def test_sequences_wait_while_the_running_ones_fill_the_memory(
    model: PackedModel, random_ids: Ids
) -> None:
    run = scheduler(model, kv_bytes=1)
    group = [generation(random_ids(seed, 50), 3) for seed in range(3)]
    for one in group:
        run.add(one)
    run.step()
    run.step()
    assert len(run.running) == 1
    assert {len(tokens) for tokens in drain(run).values()} <= {1, 2, 3}
    assert not run.busy


def test_a_taken_prefix_is_copied_unless_it_is_used_up() -> None:
    import numpy as np

    cache = PrefixCache(1 << 20)
    kv = SequenceKV(0)
    kv.reserve(10)
    buffer = kv.layer(0, torch.zeros(1, 1, 2))
    buffer[:, :10] = torch.arange(10.0)[None, :, None]
    kv.length = 10
    cache.put(list(range(10)), kv)
    copy = cache.take(np.arange(6), limit=5)
    assert copy is not None
    assert copy is not kv
    assert copy.length == 5
    assert copy.layer(0, buffer)[0, :5, 0].tolist() == [0, 1, 2, 3, 4]
    assert cache.take(np.asarray([7, 8]), limit=1) is None
    assert cache.take(np.arange(12), limit=11) is kv
    assert len(cache) == 0
    assert cache.nbytes == 0


def architectures() -> dict[str, Any]:
    from transformers import Gemma2Config, LlamaConfig, MambaConfig, MistralConfig, Qwen2Config

    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        "llama": LlamaConfig(**small),
        "qwen2 window": Qwen2Config(
            **small, use_sliding_window=True, sliding_window=9, max_window_layers=1
        ),
        "mistral window": MistralConfig(**small, sliding_window=7, head_dim=8),
        "gemma2": Gemma2Config(**small, head_dim=8, sliding_window=8),
        "mamba": MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4),
    }


@pytest.mark.parametrize("name", ["llama", "qwen2 window", "mistral window"])
def test_other_architectures_and_sliding_windows_are_exact(
    name: str, tmp_path: Path, reference_of: Any, random_ids: Ids
) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(architectures()[name]).save_pretrained(tmp_path)
    run = scheduler(PackedModel(tmp_path, device="cpu", dtype=torch.float32), step_tokens=16)
    group = [
        generation([token % 96 for token in random_ids(seed, 11 + 13 * seed)], 14)
        for seed in range(3)
    ]
    for one in group:
        run.add(one)
    tokens = drain(run)
    reference = reference_of(tmp_path)
    assert max(gap(one, tokens[one], reference) for one in group) < EXACT


@pytest.mark.parametrize("name", ["gemma2", "mamba"])
def test_a_model_that_cannot_be_served_exactly_is_refused(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.inference_mode(False):
        AutoModelForCausalLM.from_config(architectures()[name]).save_pretrained(tmp_path)
    with pytest.raises(UnservableModel, match="vLLM"):
        PackedModel(tmp_path, device="cpu", dtype=torch.float32)
