"""LoRA adapters on a real vLLM: each version under a name of its own, equal to PEFT's.

Files named ``test_real_…`` need vLLM and are marked ``vllm``. They run in the order of their names,
which is the order in which the shared servers are needed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm import AdapterPublisher
from bridle.trainer.policy.model import load_policy, score_sequence
from bridle.trainer.publish.publisher import default_probes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def adapter(model_dir: Path, directory: Path, seed: int) -> PeftModel:
    """An adapter with both of its matrices at random, written to ``directory``."""
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_policy(model_dir), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(directory)
    return model.eval()


def scores(model: PeftModel, probes: list[Any]) -> list[Any]:
    with torch.no_grad():
        return [score_sequence(model.get_base_model(), probe).numpy() for probe in probes]


def test_three_versions_are_each_served_under_a_name_of_their_own(
    vllm_servers: Any, tmp_path: Path
) -> None:
    server = vllm_servers.use("policy")
    model_dir = vllm_servers.model_dir("policy")
    probes = default_probes(250)
    with AdapterPublisher(server.base_url, base_name="policy", keep=2) as publisher:
        plain = [publisher.score(probe.tolist(), model="policy") for probe in probes]
        for version in (1, 2, 3):
            path = tmp_path / f"adapter-{version}"
            expected = scores(adapter(model_dir, path, seed=version), probes)
            assert np.abs(expected[1] - plain[1]).mean() > 0.01, "it must say something else"
            began = time.monotonic()
            published = publisher.publish(path, version, probes=probes, expected=expected)
            print(
                f"adapter {published.name}: gap {published.logprob_gap:.1e}, "
                f"{time.monotonic() - began:.2f} s",
                file=sys.stderr,
            )
            assert published.logprob_gap <= 1e-3
        assert [each.name for each in publisher.loaded] == ["policy-v00000002", "policy-v00000003"]
        with pytest.raises(EngineRefused) as gone:
            publisher.score([1, 2, 3], model="policy-v00000001")
        assert gone.value.status == 404
        after = [publisher.score(probe.tolist(), model="policy") for probe in probes]
        np.testing.assert_allclose(np.concatenate(after), np.concatenate(plain), atol=1e-4)


def test_an_adapter_that_scores_otherwise_is_unloaded(vllm_servers: Any, tmp_path: Path) -> None:
    server = vllm_servers.use("policy")
    model_dir = vllm_servers.model_dir("policy")
    probes = default_probes(250)
    expected = scores(adapter(model_dir, tmp_path / "one", seed=1), probes)
    adapter(model_dir, tmp_path / "other", seed=2)
    with AdapterPublisher(server.base_url, base_name="wrong") as publisher:
        with pytest.raises(EngineRefused, match="it was unloaded"):
            publisher.publish(tmp_path / "other", 1, probes=probes, expected=expected)
        assert publisher.loaded == []
        with pytest.raises(EngineRefused) as gone:
            publisher.score([1, 2, 3], model="wrong-v00000001")
        assert gone.value.status == 404
        with pytest.raises(ValueError, match="a new number and a new path"):
            publisher.publish(tmp_path / "other", 2, probes=probes, expected=expected)
        with pytest.raises(EngineRefused):
            publisher.publish(tmp_path / "nowhere", 3, probes=probes, expected=expected)
