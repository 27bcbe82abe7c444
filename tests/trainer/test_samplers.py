"""Tokens are trained against what they were drawn from, from the engine to the gradient."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.embedded.sampling import SamplingRow, sample
from bridle.engine.embedded.truncation import Truncation
from bridle.engine.serve.backend import SamplingParams
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit
from bridle.reconstruct.episodes import episodes
from bridle.store.reading.queries import Reader
from bridle.store.records import Sampler
from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.config import GrpoConfig
from bridle.trainer.learner.batches import UnscoredSampler, loss_terms, pack_minibatch
from bridle.trainer.losses.losses import policy_loss
from bridle.trainer.policy.model import load_policy, score_pack

PROMPT = [3, 5, 7]
DRAWS = 20_000
BANDITS = [
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.2},
    {"top_k": 64, "top_p": 0.95},
    {"temperature": 1.3, "min_p": 0.02},
]
GEMINI = Path(__file__).parents[1] / "dialects" / "fixtures" / "gemini_cli.json"


@pytest.fixture
def peaked_policy(chat_directory):
    """A policy that prefers some tokens, as a trained one does."""
    model = load_policy(chat_directory)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 3
    return model


def logits_of(model):
    return model(input_ids=torch.tensor([PROMPT])).logits[0, -1].float()


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    parts = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return torch.cat(parts).double().clone()


def true_gradient(model, rewards, fields):
    """Return the gradient of the expected reward of one token drawn with ``fields``.

    It is autograd through the definition, with the set that may be drawn from found one token at a
    time.
    """
    logits = logits_of(model) / fields.get("temperature", 1.0)
    ordered = logits.detach().double().softmax(-1).sort(descending=True)
    kept, mass, before = [], 0.0, 0.0
    allowed = ordered.values[: fields.get("top_k", len(logits))]
    allowed = allowed[allowed >= fields.get("min_p", 0.0) * allowed[0]]
    mass = float(allowed.sum())
    for value, token in zip(allowed.tolist(), ordered.indices.tolist(), strict=False):
        if before < fields.get("top_p", 1.0) * mass:
            kept.append(token)
        before += value
    probabilities = logits[kept].softmax(-1)
    return gradient(model, -(probabilities * rewards[kept]).sum()), kept


def drawn_items(model, make_sample, rewards, fields, sampler):
    """Return the engine's draws on a regular grid of uniform numbers, an item for each token."""
    row = SamplingParams(max_tokens=1, **fields)
    with torch.no_grad():
        logits = logits_of(model)
    counts, logprobs = Counter(), {}
    for start in range(0, DRAWS, 1000):
        uniforms = [(index + 0.5) / DRAWS for index in range(start, start + 1000)]
        rows = [SamplingRow(row, uniform, PROMPT, len(PROMPT)) for uniform in uniforms]
        for token in sample(logits.repeat(1000, 1), rows):
            counts[token.id] += 1
            logprobs[token.id] = token.logprob
    items = []
    for number, (token, count) in enumerate(counts.items()):
        one = make_sample([*PROMPT, token], [3], logprobs=logprobs[token], session=str(number))
        one = dataclasses.replace(one, samplers=(sampler,))
        # Sessions weigh alike; a token that came more often counts more.
        advantage = float(rewards[token]) * count / DRAWS * len(counts)
        items.append(TrainItem(one, number, "g", np.full(4, advantage, np.float32)))
    return items


def update_gradient(model, items):
    (pack,) = pack_minibatch(items, GrpoConfig())
    terms = loss_terms(pack, score_pack(model, pack.pack, drawn=pack.drawn))
    loss, _ = policy_loss(terms, GrpoConfig().loss)
    return gradient(model, loss), terms


def cosine(one, other):
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


@pytest.mark.parametrize("fields", BANDITS, ids=str)
def test_the_update_is_the_gradient_of_what_was_drawn_from(peaked_policy, make_sample, fields):
    rewards = torch.from_numpy(np.random.default_rng(7).normal(size=4096)).float()
    expected, kept = true_gradient(peaked_policy, rewards, fields)
    items = drawn_items(peaked_policy, make_sample, rewards, fields, Sampler("processed", **fields))
    assert {int(item.sample.token_ids[-1]) for item in items} <= set(kept)
    found, terms = update_gradient(peaked_policy, items)
    torch.testing.assert_close(terms.old_logprobs, terms.behaviour_logprobs, atol=1e-4, rtol=0)
    print(f"cosine {cosine(found, expected):.6f}")
    assert cosine(found, expected) >= 0.999
    plain = [
        dataclasses.replace(
            item, sample=dataclasses.replace(item.sample, samplers=(Sampler("processed"),))
        )
        for item in items
    ]
    assert cosine(update_gradient(peaked_policy, plain)[0], expected) < 0.999, "it can fail"


def test_tokens_of_several_samplers_are_scored_in_one_pass(peaked_policy, make_sample):
    with torch.no_grad():
        logits = logits_of(peaked_policy)
    likeliest = logits.argsort(descending=True).tolist()
    samplers = [Sampler("processed"), Sampler("processed", 0.5), Sampler("processed", top_k=2)]
    items = [
        TrainItem(
            dataclasses.replace(
                make_sample([*PROMPT, likeliest[1]], [3], session=str(number)), samplers=(one,)
            ),
            number,
            "g",
            np.ones(4, np.float32),
        )
        for number, one in enumerate(samplers)
    ]
    (pack,) = pack_minibatch(items, GrpoConfig())
    assert len(pack.pack.token_ids) == len(PROMPT), "they share the state"
    found = score_pack(peaked_policy, pack.pack, drawn=pack.drawn).logprobs
    expected = torch.stack(
        [
            logits.log_softmax(-1)[likeliest[1]],
            (logits / 0.5).log_softmax(-1)[likeliest[1]],
            logits[likeliest[:2]].log_softmax(-1)[1],
        ]
    )
    torch.testing.assert_close(found[pack.pack.samples.argsort()], expected)


def test_a_sampler_that_is_not_scored_is_refused(make_sample):
    sample_of_grammar = dataclasses.replace(
        make_sample([1, 2], [1]), samplers=(Sampler("processed", grammar="tool_choice"),)
    )
    with pytest.raises(UnscoredSampler, match="samplers=scored"):
        pack_minibatch([TrainItem(sample_of_grammar, 0, "g", np.ones(2, np.float32))], GrpoConfig())


def test_no_token_of_gemini_cli_is_trained_as_if_drawn_otherwise(chat_directory, tmp_path):
    body = json.loads(GEMINI.read_text())
    asked = {
        "contents": [{"role": "user", "parts": [{"text": "What is the capital of Norway?"}]}],
        "generationConfig": {**body["generationConfig"], "maxOutputTokens": 24},
    }
    store = str(tmp_path / "bridle.db")
    with EmbeddedEngine(chat_directory) as engine:
        settings = ProxySettings(upstream_url=engine.base_url, store_url=store)
        with ProxyServer(settings) as proxy:
            url = f"{proxy.base_url}/s/gemini/v1beta/models/gemini-2.5-pro:generateContent"
            httpx.post(url, json=asked, timeout=60).raise_for_status()
    with Reader(store) as reader:
        (audited,) = audit(reader)
        (episode,) = episodes(reader)
    label = "top_p 0.95, top_k 64"
    assert audited.samplers.keys() == {label}
    assert audited.samplers[label].trainable == audited.samplers[label].captured > 0
    items = [
        TrainItem(each, 0, "g", np.ones(len(each.token_ids), np.float32))
        for each in episode.samples
    ]
    (pack,) = pack_minibatch(items, GrpoConfig())
    assert pack.drawn.settings.unique(dim=0).tolist() == [[1.0, 0.95, 64.0, 0.0]]
    scores = score_pack(load_policy(chat_directory), pack.pack, drawn=pack.drawn)
    torch.testing.assert_close(scores.logprobs.detach(), pack.behaviour_logprobs, atol=1e-4, rtol=0)


def nucleus_first(self, scores, targets=None):
    """Return the set of an engine that takes top-p of all tokens, and top-k of what is left."""
    ordered, order = scores.double().softmax(-1).sort(descending=True, stable=True)
    within = ordered.cumsum(-1) - ordered < self.top_p[:, None]
    within &= torch.arange(scores.shape[-1]) < self.top_k[:, None]
    return torch.zeros_like(within).scatter_(-1, order, within)


@pytest.mark.parametrize("stream", [False, True])
def test_the_set_that_the_engine_drew_from_is_the_one_that_is_scored(
    chat_directory, tmp_path, monkeypatch, stream
):
    store = str(tmp_path / "bridle.db")
    body = {"model": "m", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    body |= {"top_p": 0.9, "top_k": 12, "max_tokens": 24, "seed": 5, "stream": stream}
    with monkeypatch.context() as patch, EmbeddedEngine(chat_directory) as engine:
        patch.setattr(Truncation, "kept", nucleus_first)
        settings = ProxySettings(upstream_url=engine.base_url, store_url=store)
        with ProxyServer(settings) as proxy:
            url = f"{proxy.base_url}/s/mask/v1/chat/completions"
            httpx.post(url, json=body, timeout=60).raise_for_status()
    with Reader(store) as reader:
        (episode,) = episodes(reader)
    (one,) = episode.samples
    sampled = np.flatnonzero(one.mask)
    assert all(one.token_ids[at] in one.kept.of_token(at) for at in sampled)
    assert not any(len(one.kept.of_token(at)) for at in np.flatnonzero(~one.mask))
    model = load_policy(chat_directory)

    def gap(sample):
        item = TrainItem(sample, 0, "g", np.ones(len(sample.token_ids), np.float32))
        (pack,) = pack_minibatch([item], GrpoConfig())
        scores = score_pack(model, pack.pack, drawn=pack.drawn)
        return (scores.logprobs.detach() - pack.behaviour_logprobs).abs().max()

    assert gap(one) < 1e-5
    assert gap(dataclasses.replace(one, kept=None)) > 1e-3
