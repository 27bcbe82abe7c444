"""A real vLLM that is killed comes back with the weights that it served last, or stays down."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.engine.vllm import VllmControl, VllmError, VllmServer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit
from bridle.store.reading.queries import Reader
from bridle.store.records import CallStatus
from bridle.trainer.policy.model import load_policy, save_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def wait_for_refusal(server: VllmServer) -> None:
    while True:
        server.wait_ready()
        time.sleep(0.05)


def test_killed_in_mid_session_it_comes_back_with_the_published_weights_or_stays_down(
    publishing: Callable[[str], Any], vllm_servers: Any, tmp_path: Path
) -> None:
    policy = publishing("policy")
    server = policy.server
    policy.step(seed=3, size=0.001)
    published = tmp_path / "v00000042"
    save_policy(policy.model, published, policy.origin)
    database = str(tmp_path / "bridle.db")
    settings = ProxySettings(server.base_url, database, tokenizer_dir=policy.origin)
    proxy = ProxyServer(settings, grace_s=1)
    proxy.start()
    history = [{"role": "user", "content": "text"}]

    def ask(messages: list[dict[str, Any]]) -> httpx.Response:
        body = {"model": "x", "messages": messages, "max_tokens": 40}
        url = f"{proxy.base_url}/s/work/v1/messages"
        return httpx.post(url, json=body, timeout=60, trust_env=False)

    try:
        with VllmControl(server.base_url) as control:
            control.pause("wait")
            control.reload_weights(published)
            control.stamp(42)
            told = {"version": 42}
            httpx.put(f"{proxy.base_url}/bridle/v1/policy", json=told, trust_env=False)
            control.resume()
            first = ask(history)
            assert first.is_success, first.text
            killed = server.pid
            os.kill(killed, signal.SIGKILL)
            while control.healthy():
                time.sleep(0.01)
            history += [
                {"role": "assistant", "content": first.json()["content"]},
                {"role": "user", "content": "count"},
            ]
            down = ask(history)
            assert down.status_code == 502
            assert down.json()["type"] == "error", "as the Messages API tells it"
            assert down.json()["error"]["type"] == "overloaded_error"

            while server.pid == killed:
                time.sleep(0.05)
            server.wait_ready()
            print(f"vLLM served again after {server.started_in:.1f} s", file=sys.stderr)
            assert control.policy_version() == 42
            assert policy.scored_gap(control) <= 1e-3
            assert httpx.get(f"{proxy.base_url}/readyz", timeout=60, trust_env=False).is_success
            assert ask(history).is_success

            save_policy(load_policy(policy.origin), published, policy.origin)
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(VllmError, match="gone or changed since they were served"):
                wait_for_refusal(server)
            assert not control.healthy()
    finally:
        proxy.stop()
        vllm_servers.stop()
    with Reader(database) as store:
        (session,) = store.sessions()
        calls = store.calls(session.id)
        print([(call.status, call.reason, call.lineage_rule) for call in calls], file=sys.stderr)
        complete = [call for call in calls if call.status is CallStatus.COMPLETE]
        assert [call.version_start for call in complete] == [42, 42]
        assert calls[-1].parent_call_id == calls[0].id, "the session went on"
        assert all(audited.clean for audited in audit(store))
