"""A real vLLM that is killed comes back with the weights that it served last."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.vllm import VllmControl, VllmError, VllmServer
from trainer.model import load_policy, save_policy, score_sequence

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def wait_for_refusal(server: VllmServer) -> None:
    while True:
        server.wait_ready()
        time.sleep(0.05)


def test_killed_it_comes_back_with_the_published_weights_or_stays_down(
    vllm_servers: Any, tmp_path: Path
) -> None:
    server = vllm_servers.use("policy")
    origin = vllm_servers.model_dir("policy")
    model = load_policy(origin)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    published = tmp_path / "v00000042"
    save_policy(model, published, origin)
    probe = np.random.default_rng(0).integers(0, 250, 64)
    with torch.no_grad():
        expected = score_sequence(model, probe).numpy()
    with VllmControl(server.base_url) as control:
        control.pause("wait")
        control.reload_weights(published)
        control.stamp(42)
        control.resume()
        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        while server.pid == killed:
            server.wait_ready()
        server.wait_ready()
        print(f"vLLM served again after {server.started_in:.1f} s", file=sys.stderr)
        assert control.policy_version() == 42
        assert np.abs(control.score(probe.tolist()) - expected).mean() <= 1e-3

        save_policy(load_policy(origin), published, origin)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(VllmError, match="gone or changed since they were served"):
            wait_for_refusal(server)
        assert not control.healthy()
    vllm_servers.stop()
