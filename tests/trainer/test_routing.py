"""A policy with experts is trained through the experts that its engine chose."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.support.moe import LAYERS, TOP_K, make_moe_policy
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.embedded.routing import Routers
from bridle.harnesses.client import Client
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.dataset import open_store
from bridle.reconstruct.episodes import episodes
from bridle.reconstruct.exports.parquet import export_parquet
from bridle.reconstruct.exports.selection import Selection
from bridle.run.feed import feed
from bridle.store.operations.copying import backup
from bridle.store.reading.queries import Reader
from bridle.store.writing.writer import Writer
from bridle.trainer.batch.packing import make_packs, with_routing
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import ComputeConfig, GrpoConfig, PackingConfig
from bridle.trainer.learner.batches import loss_terms, pack_minibatch
from bridle.trainer.losses.losses import policy_loss
from bridle.trainer.policy.model import load_policy, score_pack
from bridle.trainer.policy.routing import RoutingDiffers

LAYOUTS = ("tree", "flat", "padded")


@pytest.fixture(scope="module")
def moe_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    make_moe_policy(directory)
    return directory


@pytest.fixture(scope="module")
def session_store(moe_directory, tmp_path_factory):
    """A store with a session of two turns and a retry, one streamed and two whole."""
    store = str(tmp_path_factory.mktemp("store") / "bridle.db")
    with EmbeddedEngine(moe_directory) as engine:
        settings = ProxySettings(upstream_url=engine.base_url, store_url=store)
        with ProxyServer(settings) as proxy:
            url = f"{proxy.base_url}/s/moe/v1/chat/completions"
            messages = [{"role": "user", "content": "What is the capital of Norway?"}]
            for seed, stream in ((1, False), (2, True), (3, False)):
                body = {"model": "m", "messages": messages, "max_tokens": 12, "seed": seed}
                reply = httpx.post(url, json=body | {"stream": stream}, timeout=60)
                reply.raise_for_status()
                if seed == 1:
                    messages.append(reply.json()["choices"][0]["message"])
                    messages.append({"role": "user", "content": "Call lookup with 12"})
    return store


@pytest.fixture(scope="module")
def recorded(session_store):
    """The samples of that session."""
    with Reader(session_store) as reader:
        (episode,) = episodes(reader)
    return episode.samples


def items_of(samples):
    chooser = np.random.default_rng(3)
    return [
        TrainItem(one, 0, "g", chooser.normal(size=len(one.token_ids)).astype(np.float32))
        for one in samples
    ]


def perturbed(directory, **options):
    """The policy with noise on its routers, so that they choose other experts."""
    model = load_policy(directory, **options)
    chooser = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for router in Routers.of(model).by_layer.values():
            router.weight += 0.1 * torch.randn(router.weight.shape, generator=chooser)
    return model


def update_gradients(model, samples, layout, replay):
    config = GrpoConfig(packing=PackingConfig(layout=layout), replay_routing=replay)
    model.zero_grad()
    scored = {}
    for pack in pack_minibatch(items_of(samples), config):
        scores = score_pack(model, pack.pack, drawn=pack.drawn)
        loss, _ = policy_loss(loss_terms(pack, scores), config.loss)
        loss.backward()
        places = zip(pack.pack.samples, pack.pack.offsets, scores.logprobs.tolist(), strict=True)
        scored |= {(int(one), int(offset)): value for one, offset, value in places}
    return {name: each.grad.clone() for name, each in model.named_parameters()}, scored


def force(model, experts):
    """Mix ``experts`` (``[T, layers, top_k]``) in each layer, written out by hand."""
    for number, layer in enumerate(model.model.layers):
        if number == 0:
            continue

        def forward(states, block=layer.mlp, numbers=experts[:, number]):
            rows = states.reshape(-1, states.shape[-1])
            shares = linear(rows, block.gate.weight).float().softmax(-1)
            outputs = []
            for row, chosen, share in zip(rows, numbers, shares, strict=True):
                weights = share[chosen] / share[chosen].sum()
                mixed = 0.0
                for expert, weight in zip(chosen, weights, strict=True):
                    gate, up = linear(row, block.experts.gate_up_proj[expert]).chunk(2)
                    inner = torch.nn.functional.silu(gate) * up
                    mixed = mixed + weight * linear(inner, block.experts.down_proj[expert])
                outputs.append(mixed)
            return torch.stack(outputs).reshape(states.shape)

        layer.mlp.forward = forward


def by_hand_gradients(directory, samples):
    """Return gradients of the loss and logprobs, each sample alone, its experts mixed by hand."""
    config = GrpoConfig()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.load_state_dict(perturbed(directory).state_dict())
    model.requires_grad_(True)
    logprobs = {}
    for number, sample in enumerate(samples):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        force(model, torch.from_numpy(sample.routed_experts[1:].astype(np.int64)))
        found = model(input_ids=ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        for offset in np.flatnonzero(sample.mask):
            logprobs[number, int(offset)] = found[offset - 1, ids[offset]]
    for pack in pack_minibatch(items_of(samples), config):
        keys = zip(pack.pack.samples.tolist(), pack.pack.offsets.tolist(), strict=True)
        chosen = torch.stack([logprobs[key] for key in keys])
        scores = dataclasses.replace(score_pack(load_policy(directory), pack.pack), logprobs=chosen)
        loss, _ = policy_loss(loss_terms(pack, scores), config.loss)
        loss.backward(retain_graph=True)
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    return gradients, {key: float(value.detach()) for key, value in logprobs.items()}


def own_choices(model, samples):
    """Return the experts that the policy chooses itself, by sample, ``[T - 1, layers, top_k]``."""
    latest = Routers.of(model).record()
    found = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
        found.append(latest().numpy())
    return found


def test_every_position_of_a_recorded_branch_has_its_experts(recorded, moe_directory):
    assert len(recorded) == 3
    model = load_policy(moe_directory)
    for sample, own in zip(recorded, own_choices(model, recorded), strict=True):
        experts = sample.routed_experts
        assert experts.shape == (len(sample.token_ids), LAYERS, TOP_K)
        assert (experts[0] == -1).all()
        assert (experts[1:, 0] == 0).all()  # the layer without experts
        assert (np.sort(experts[1:, 1:]) == np.sort(own[:, 1:])).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_engines_routing(recorded, moe_directory, layout):
    model = perturbed(moe_directory)
    own = own_choices(model, recorded)
    assert any(
        (np.sort(one.routed_experts[1:]) != np.sort(mine)).any()
        for one, mine in zip(recorded, own, strict=True)
    )
    replayed, scored = update_gradients(model, recorded, layout, "auto")
    expected, by_hand = by_hand_gradients(moe_directory, recorded)
    assert scored.keys() == by_hand.keys()
    assert max(abs(scored[key] - by_hand[key]) for key in scored) < 1e-5
    for name, gradient in expected.items():
        torch.testing.assert_close(replayed[name], gradient, atol=1e-6, rtol=0, msg=name)
    routers = [name for name in replayed if name.endswith("mlp.gate.weight")]
    assert routers
    assert all(replayed[name].abs().max() > 1e-4 for name in routers)
    without, _ = update_gradients(model, recorded, layout, "off")
    assert max((without[name] - expected[name]).abs().max() for name in expected) > 1e-3


def test_recomputed_layers_are_routed_alike(recorded, moe_directory):
    kept, _ = update_gradients(perturbed(moe_directory), recorded, "tree", "auto")
    compute = ComputeConfig(device="cpu", recompute=True)
    model = perturbed(moe_directory, compute=compute)
    recomputed, _ = update_gradients(model, recorded, "tree", "auto")
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-7, rtol=0, msg=name)


def test_the_unperturbed_policy_scores_as_its_engine_did(recorded, moe_directory):
    model = load_policy(moe_directory)
    for pack in pack_minibatch(items_of(recorded), GrpoConfig()):
        scores = score_pack(model, pack.pack, drawn=pack.drawn)
        gap = (scores.logprobs.detach() - pack.behaviour_logprobs).abs().max()
        assert gap < 1e-5


def test_routing_of_another_model_is_refused(recorded, moe_directory):
    other = [dataclasses.replace(one, routed_experts=one.routed_experts[:, 1:]) for one in recorded]
    (pack,) = make_packs(other, PackingConfig())
    with pytest.raises(RoutingDiffers, match="the policy has 3 with 2 of 8"):
        score_pack(load_policy(moe_directory), with_routing(pack, other))


FAMILIES = {
    "qwen2_moe": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "olmoe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "routed_scaling_factor": 1.5,
    },
}


def family(kind, tmp_path, **changed):
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        **FAMILIES[kind] | changed,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return load_policy(tmp_path)


@dataclasses.dataclass
class Routed:
    token_ids: np.ndarray
    mask: np.ndarray
    routed_experts: np.ndarray | None


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_mixes_the_experts_that_it_is_given(kind, tmp_path):
    model = family(kind, tmp_path)
    routers = Routers.of(model)
    ids, mask = np.arange(12, dtype=np.uint32) + 3, np.arange(12) > 0
    (own,) = own_choices(model, [Routed(ids, mask, None)])
    given = np.concatenate([np.full_like(own[:1], -1), (own + 1) % routers.experts])
    given[1:, [layer for layer in range(routers.layers) if layer not in routers.by_layer]] = 0
    for layout, (numbers, expected) in itertools.product(
        LAYOUTS, ((given[1:], given[1:]), (None, own))
    ):
        experts = None if numbers is None else np.concatenate([given[:1], numbers])
        sequence = Routed(ids, mask, experts)
        (pack,) = make_packs([sequence], PackingConfig(layout=layout))
        latest = routers.record()
        score_pack(model, with_routing(pack, [sequence]))
        assert (np.sort(latest().numpy()) == np.sort(expected)).all()


def test_a_router_that_does_not_follow_is_reported_and_chooses_itself(tmp_path, caplog):
    """Groups that DeepSeek-V2's router rules out weigh nothing there."""
    FAMILIES["deepseek_v2"] = FAMILIES["deepseek_v3"] | {"topk_method": "group_limited_greedy"}
    with caplog.at_level(logging.WARNING):
        model = family("deepseek_v2", tmp_path, topk_group=1)
    assert "recorded routing is not replayed: DeepseekV2TopkRouter" in caplog.text
    ids, mask = np.arange(12, dtype=np.uint32) + 3, np.arange(12) > 0
    experts = np.zeros((12, 2, 2), np.int16)
    (pack,) = make_packs([Routed(ids, mask, experts)], PackingConfig())
    routed = with_routing(pack, [Routed(ids, mask, experts)])
    torch.testing.assert_close(
        score_pack(model, routed).logprobs, score_pack(model, pack).logprobs, atol=0, rtol=0
    )


async def test_the_feed_and_tables_have_the_experts_if_asked(session_store, recorded, tmp_path):
    backup(session_store, tmp_path / "sealed.db")
    store = str(tmp_path / "sealed.db")
    with open_store(store) as opened, Writer(store) as writer:
        assert "routed_experts" not in opened.samples_table().column_names
        rows = opened.samples_table(facts=True).to_pylist()
        (session,) = opened.sessions()
        writer.update_session_sync(session.id, sealed_at=1.0)
    settings = ProxySettings(upstream_url="http://127.0.0.1:1", store_url=store)
    with ProxyServer(settings, routers=[feed]) as proxy:
        async with Client(proxy.base_url) as client:
            plain = (await client.lease("plain")).sessions[0]["samples"]
            full = (await client.lease("full", facts=True)).sessions[0]["samples"]
        async with httpx.AsyncClient(base_url=proxy.base_url) as plain_client:
            query = {"facts": True, "format": "arrow"}
            arrow = await plain_client.get("/bridle/v1/trajectories", params=query)
    assert "routed_experts" not in plain[0]
    streamed = pa.ipc.open_stream(arrow.content).read_all().to_pylist()
    for found in (rows, full, streamed):
        for row, sample in zip(found, recorded, strict=True):
            experts = np.reshape(row["routed_experts"], row["routed_shape"])
            assert np.array_equal(experts, sample.routed_experts)
            assert row["kept_counts"] is None


def test_a_file_of_tokens_has_the_experts_if_asked(session_store, recorded, tmp_path):
    plain, full = tmp_path / "plain.parquet", tmp_path / "full.parquet"
    with Reader(session_store) as reader:
        export_parquet(reader, plain)
        export_parquet(reader, full, Selection(facts=True))
    assert "routed_experts" not in pq.read_schema(plain).names
    rows = pq.read_table(full).to_pylist()
    assert len(rows) == len(recorded)
    for row, sample in zip(rows, recorded, strict=True):
        experts = np.reshape(row["routed_experts"], row["routed_shape"])
        assert np.array_equal(experts, sample.routed_experts)
        assert row["kept_counts"] is None


def test_experts_of_a_reply_that_a_text_ends_are_those_of_its_tokens(moe_directory, tmp_path):
    """The engine has computed tokens after the one that the text ends in, in the same step."""
    store = str(tmp_path / "bridle.db")
    messages = [{"role": "user", "content": "What is the capital of Norway?"}]
    body = {"model": "m", "messages": messages, "max_tokens": 12, "seed": 1}
    with EmbeddedEngine(moe_directory) as engine:
        settings = ProxySettings(upstream_url=engine.base_url, store_url=store)
        with ProxyServer(settings) as proxy:
            url = f"{proxy.base_url}/s/stop/v1/chat/completions"
            whole = httpx.post(url, json=body, timeout=60).json()
            text = whole["choices"][0]["message"]["content"]
            httpx.post(url, json=body | {"stop": text[4:7]}, timeout=60).raise_for_status()
    with Reader(store) as reader:
        (session,) = reader.sessions()
        unstopped, stopped = reader.calls(session.id)
        (choice,) = reader.sampled(stopped.id)
        (first,) = reader.sampled(unstopped.id)
    length = len(choice.token_ids)
    assert 0 < length < len(first.token_ids)
    assert np.array_equal(choice.routed_experts, first.routed_experts[:length])
    assert not any(note.name == "routed_experts_unread" for note in stopped.notes)
