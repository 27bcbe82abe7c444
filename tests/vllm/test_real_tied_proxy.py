"""A weight update in the middle of a recorded reply: one call, two versions, at the right token."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.vllm import VllmControl
from proxy.server import ProxyServer
from proxy.settings import ProxySettings
from reconstruct.audit import audit
from store.queries import Reader
from trainer.model import load_policy, save_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTH = 800
"""Tokens: more than are sampled before a busy machine has seen the first 20."""


def test_one_call_carries_both_versions_from_the_token_where_the_engine_changed(
    publishing: Callable[[str], Any], tmp_path: Path
) -> None:
    policy = publishing("tied")
    old, policy.model = policy.model, load_policy(policy.origin)
    policy.step(seed=4)
    save_policy(policy.model, tmp_path / "newer", policy.origin)
    settings = ProxySettings(policy.server.base_url, str(tmp_path / "bridle.db"))
    server = ProxyServer(settings, grace_s=1)
    server.start()
    pieces: list[str] = []

    def read() -> None:
        body = {
            "model": "x",
            "messages": [{"role": "user", "content": "go on"}],
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{server.base_url}/s/work/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as reply:
            pieces.extend(line for line in reply.iter_lines() if line.startswith("data: "))

    reader = threading.Thread(target=read, daemon=True)
    try:
        with VllmControl(policy.server.base_url) as control:
            reader.start()
            deadline = time.monotonic() + 60
            while len(pieces) < 20:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            control.pause("keep", clear_cache=True)
            time.sleep(0.3)
            control.reload_weights(tmp_path / "newer")
            announced = httpx.put(
                f"{server.base_url}/bridle/v1/policy", json={"version": 1}, trust_env=False
            )
            assert announced.is_success, announced.text
            control.resume()
            reader.join(120)
            control.pause("wait")
            control.reload_weights(policy.origin)
            control.resume()
    finally:
        server.stop()
    assert pieces[-1] == "data: [DONE]"
    assert not any("error" in json.loads(piece[6:]) for piece in pieces[:-1])

    with Reader(str(tmp_path / "bridle.db")) as store:
        (session,) = store.sessions()
        (call,) = store.calls(session.id)
        assert (call.version_start, call.version_end) == (0, 1)
        prompt = store.prompt_token_ids(call.id)
        (choice,) = store.sampled(call.id)
        assert prompt is not None
        assert [run.version for run in choice.versions] == [0, 1]
        change = choice.versions[1].start
        ids = np.concatenate([np.asarray(prompt), np.asarray(choice.token_ids)]).astype(np.int64)
        assert len(choice.token_ids) == LENGTH
        gaps = []
        for model in (old, policy.model):
            policy.model = model
            expected = policy.scores(ids)[len(prompt) - 1 :]
            gaps.append(np.abs(np.asarray(choice.logprobs) - expected))
        by_old, by_new = gaps
        assert by_old[:change].max() <= 1e-3
        assert by_new[change:].max() <= 1e-3
        # One token to either side the other weights are plainly seen.
        assert by_old[change:].mean() > 0.01
        assert by_new[:change].mean() > 0.01
        assert all(audited.clean for audited in audit(store))
