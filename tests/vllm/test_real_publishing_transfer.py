"""New weights for a real vLLM from the trainer's memory, through gloo, and ways to break off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm.inside.bridle_wire import Announcement, open_store
from bridle.engine.vllm.transfer import TransferRoute, VllmTransfer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.run.publishing import publishing
from bridle.run.stack import Stack
from bridle.run.training_plan import TrainingPlan
from bridle.store.reading.queries import Reader
from bridle.store.records import RunRecord
from bridle.store.writing.writer import Writer
from bridle.trainer.config import GrpoConfig, PublishConfig
from bridle.trainer.policy.model import checkpoint_tensors
from bridle.trainer.policy.weights import ModelWeights
from bridle.trainer.publish.transfer import TransferPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

DYING_SENDER = """
import os, signal, sys
from safetensors.torch import load_file
from bridle.engine.vllm import transfer

class Dying(transfer.Group):
    sent = 0
    def broadcast(self, bucket, cancelled=lambda: False):
        super().broadcast(bucket, cancelled)
        Dying.sent += 1
        if Dying.sent == 3:
            os.kill(os.getpid(), signal.SIGKILL)

transfer.Group = Dying
route = transfer.TransferRoute(bucket_bytes=1 << 14)
with transfer.VllmTransfer(sys.argv[1], route=route) as engine:
    engine.send(load_file(sys.argv[2]))
"""


@pytest.fixture
def policy(publishing: Callable[[str], Any]) -> Any:
    return publishing("policy")


@pytest.fixture
def engine(policy: Any) -> Iterator[VllmTransfer]:
    """Serves the first weights again afterwards."""
    with VllmTransfer(policy.server.base_url, route=TransferRoute(bucket_bytes=1 << 14)) as engine:
        yield engine
        engine.pause("abort")
        engine.reload_weights(policy.origin)
        engine.resume()


def test_each_of_three_transfers_is_what_the_engine_samples_from(policy: Any) -> None:
    assert not policy.model.config.tie_word_embeddings
    policy.transfer_three()


@pytest.mark.sampled(0)
def test_adapters_are_transferred_merged_in(policy: Any) -> None:
    policy.with_adapters()
    policy.transfer_three()


@pytest.mark.parametrize("wrong", ["missing", "more", "shape"])
@pytest.mark.sampled(3)
def test_tensors_of_another_model_are_refused_and_the_old_ones_go_on(
    policy: Any, engine: VllmTransfer, wrong: str
) -> None:
    tensors = dict(checkpoint_tensors(policy.model))
    if wrong == "missing":
        del tensors["model.norm.weight"]
    else:
        name = "model.norm.weight" if wrong == "shape" else "model.extra.weight"
        tensors[name] = torch.ones(7)
    with pytest.raises(EngineRefused, match="the weights were not changed"):
        engine.send(tensors)
    assert policy.scored_gap(engine) <= 1e-3


@pytest.mark.sampled(0)
def test_a_sender_that_is_killed_in_mid_transfer_changes_nothing(
    policy: Any, engine: VllmTransfer, tmp_path: Path
) -> None:
    weights = policy.origin / "model.safetensors"
    arguments = [policy.server.base_url, str(weights)]
    sender = subprocess.run([sys.executable, "-c", DYING_SENDER, *arguments], cwd=ROOT)
    assert sender.returncode == -signal.SIGKILL
    assert policy.scored_gap(engine) <= 1e-3, "served on"
    with pytest.raises(EngineRefused, match=r"the transfer broke.*the weights were not changed"):
        engine.require_weights()
    with pytest.raises(EngineRefused):
        engine.load_weights(9)
    assert policy.scored_gap(engine) <= 1e-3
    policy.step(seed=2)
    with policy.transferring(engine) as publishing:
        assert publishing.publish(policy.model, 10).verified


def test_a_sender_that_falls_silent_does_not_hold_the_engine_up(
    policy: Any, engine: VllmTransfer
) -> None:
    tensors = checkpoint_tensors(policy.model)
    store, port = open_store("127.0.0.1", 60.0)
    announcement = Announcement(
        tensors=[(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()],
        address="127.0.0.1",
        port=port,
        world_size=2,
        backend="gloo",
        bucket_bytes=1 << 20,
        stall_seconds=4.0,
    )
    engine.announce_weights(asdict(announcement))
    assert policy.scored_gap(engine) <= 1e-3, "served while it waits"
    began = time.monotonic()
    with pytest.raises(EngineRefused, match="the group did not form"):
        engine.require_weights()
    assert time.monotonic() - began < 30
    assert policy.scored_gap(engine) <= 1e-3
    del store


def test_a_run_that_publishes_by_transfer_reaches_engine_proxy_and_store(
    policy: Any, engine: VllmTransfer, tmp_path: Path
) -> None:
    store = str(tmp_path / "bridle.db")
    proxy = ProxyServer(ProxySettings(policy.server.base_url, store), grace_s=1)
    proxy.start()
    plan = TrainingPlan(
        policy=policy.origin,
        directory=tmp_path,
        store=store,
        run_id="run",
        config=GrpoConfig(publish=PublishConfig(through="transfer")),
    )
    stack = Stack(policy.server.base_url, proxy.base_url, kind="vllm")
    version = (engine.policy_version() or 0) + 1
    policy.step(seed=4)
    try:
        with Writer(store) as writer:
            writer.add_sync(RunRecord("run", "train", 1.0))
            with publishing(plan, stack, ModelWeights(policy.model), writer) as publisher:
                publisher.publish(policy.model, version)
                assert stack.version() == version
        with Reader(store) as reader:
            (kept,) = reader.policies("run")
    finally:
        proxy.stop()
    assert (kept.version, kept.verified) == (version, True)
    assert kept.path == str(policy.server.served().directory)


@pytest.mark.sampled(0)
def test_killed_it_comes_back_with_what_has_a_directory_and_gets_no_calls_until_published_to(
    policy: Any, engine: VllmTransfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = policy.server
    first = (engine.policy_version() or 0) + 1
    settings = ProxySettings(server.base_url, str(tmp_path / "b.db"), tokenizer_dir=policy.origin)
    proxy = ProxyServer(settings, grace_s=1)
    proxy.start()

    def ask() -> httpx.Response:
        body = {"model": "x", "messages": [{"role": "user", "content": "text"}], "max_tokens": 4}
        url = f"{proxy.base_url}/s/work/v1/chat/completions"
        return httpx.post(url, json=body, timeout=60, trust_env=False)

    def tell(version: int) -> None:
        told = {"version": version, "back": True}
        httpx.put(f"{proxy.base_url}/bridle/v1/policy", json=told, trust_env=False)

    publishing = policy.transferring(engine, tell)
    written = threading.Event()
    write = TransferPublisher._write

    def write_later(*arguments: Any) -> None:
        assert written.wait(300)
        write(*arguments)

    try:
        policy.step(seed=5)
        publishing.publish(policy.model, first)
        publishing.wait_written()
        assert server.served().version == str(first), "a restart would begin with it"
        noted = server.served().directory
        monkeypatch.setattr(TransferPublisher, "_write", write_later)
        with_directory = {name: each.clone() for name, each in policy.model.state_dict().items()}
        policy.step(seed=6)
        publishing.publish(policy.model, first + 1)
        assert ask().is_success
        assert server.served().version == str(first), "the newer weights are nowhere on disk"
        newer = {name: each.clone() for name, each in policy.model.state_dict().items()}

        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        while server.pid == killed:
            time.sleep(0.05)
        server.wait_ready()
        assert (engine.policy_version(), server.served().directory) == (first, noted)
        policy.model.load_state_dict(with_directory)
        assert policy.scored_gap(engine) <= 1e-3, "the weights that the stamp says"
        refused = ask()
        assert refused.status_code == 503, refused.text
        assert "restarted with other weights" in refused.text

        policy.model.load_state_dict(newer)
        written.set()
        publishing.publish(policy.model, first + 1)
        assert ask().is_success
        publishing.wait_written()
        assert server.served().version == str(first + 1)
    finally:
        written.set()
        proxy.stop()
        publishing.__exit__(None, None, None)
