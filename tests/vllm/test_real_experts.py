"""A real vLLM's experts, through the proxy into the record."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tests.support.moe import LAYERS, TOP_K, make_moe_policy

from bridle.engine.embedded.routing import Routers
from bridle.engine.vllm import VllmOptions, VllmServer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.episodes import episodes
from bridle.store.reading.queries import Reader
from bridle.trainer.policy.model import load_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_experts_of_vllm_are_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    policy, store = tmp_path / "policy", str(tmp_path / "bridle.db")
    make_moe_policy(policy, hidden=64, head_dim=32)
    options = VllmOptions(extra=("--enable-return-routed-experts",), cpu_kv_cache_gib=1)
    with VllmServer(policy, tmp_path, options=options) as server:
        settings = ProxySettings(upstream_url=server.base_url, store_url=store)
        with ProxyServer(settings) as proxy:
            url = f"{proxy.base_url}/s/moe/v1/chat/completions"
            messages = [{"role": "user", "content": "What is the capital of Norway?"}]
            body = {"model": "policy", "messages": messages, "max_tokens": 12}
            httpx.post(url, json=body, timeout=120).raise_for_status()
    with Reader(store) as reader:
        (episode,) = episodes(reader)
    (sample,) = episode.samples
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (len(sample.token_ids), LAYERS, TOP_K)
    model = load_policy(policy)
    routers = Routers.of(model)
    assert routers is not None
    latest = routers.record()
    with torch.no_grad():
        ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))
        model(input_ids=ids[None], use_cache=False)
    own = latest()
    assert own is not None
    # vLLM's own arithmetic may choose otherwise where two experts are about as likely.
    same = np.sort(sample.routed_experts[1:, 1:]) == np.sort(own.numpy()[:, 1:])
    assert same.mean() > 0.95
