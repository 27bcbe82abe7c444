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
"""Tokens: more than are sampled, as a rule, before a busy machine has seen the first 20."""

ATTEMPTS = 5


class Streaming:
    """A reply of :data:`LENGTH` tokens, read by a thread of its own as it comes."""

    def __init__(self, base_url: str, session: str) -> None:
        self.session = session
        self.pieces: list[str] = []
        self._url = f"{base_url}/s/{session}/v1/chat/completions"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        body = {
            "model": "x",
            "messages": [{"role": "user", "content": "go on"}],
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", self._url, json=body, timeout=120, trust_env=False) as reply:
            self.pieces.extend(line for line in reply.iter_lines() if line.startswith("data: "))

    def wait_for(self, pieces: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.pieces) < pieces:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def settle(self) -> None:
        """Until nothing has come for a while."""
        before = -1
        while len(self.pieces) > before:
            before = len(self.pieces)
            time.sleep(0.3)

    def wait(self) -> None:
        self._thread.join(120)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


def paused_in_mid_reply(base_url: str, control: VllmControl) -> Streaming:
    """A reply that waits, in the middle, for the engine to be resumed.

    On a busy machine a reply may be sampled to its end before the pause arrives; then the next one
    is tried.
    """
    for attempt in range(ATTEMPTS):
        reply = Streaming(base_url, f"work-{attempt}")
        reply.wait_for(20)
        control.pause("keep", clear_cache=True)
        reply.settle()
        if not reply.ended:
            return reply
        control.resume()
    raise AssertionError(f"{ATTEMPTS} replies ended before the engine paused")


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
    try:
        with VllmControl(policy.server.base_url) as control:
            reply = paused_in_mid_reply(server.base_url, control)
            control.reload_weights(tmp_path / "newer")
            announced = httpx.put(
                f"{server.base_url}/bridle/v1/policy", json={"version": 1}, trust_env=False
            )
            assert announced.is_success, announced.text
            control.resume()
            reply.wait()
            control.pause("wait")
            control.reload_weights(policy.origin)
            control.resume()
    finally:
        server.stop()
    assert reply.pieces[-1] == "data: [DONE]"
    assert not any("error" in json.loads(piece[6:]) for piece in reply.pieces[:-1])

    with Reader(str(tmp_path / "bridle.db")) as store:
        (session,) = (s for s in store.sessions() if s.name == reply.session)
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
