"""Test the effect of a pause on a reply, token by token, while a real vLLM samples it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bridle.engine.vllm import VllmControl
from bridle.engine.vllm.transfer import VllmTransfer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.reconstruct.audit import audit
from bridle.store.reading.queries import Reader
from bridle.trainer.policy.model import checkpoint_tensors, load_policy, save_policy, score_sequence
from support.processes import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTH = 800
"""Tokens: more than are sampled, as a rule, before a busy machine has seen the first 20."""


class Reply(threading.Thread):
    """A long streamed reply, read in the background."""

    def __init__(self, base_url: str) -> None:
        super().__init__(daemon=True)
        self.url = f"{base_url}/v1/chat/completions"
        self.prompt_ids: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stream_ids: set[str] = set()
        self.error: Exception | None = None

    def run(self) -> None:
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": "count"}],
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": True,
            "return_token_ids": True,
            "stream": True,
        }
        try:
            with httpx.stream("POST", self.url, json=body, timeout=60, trust_env=False) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self.take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = error

    def take(self, chunk: dict[str, Any]) -> None:
        self.stream_ids.add(chunk["id"])
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        for choice in chunk["choices"]:
            self.token_ids += choice.get("token_ids") or []
            entries = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs += [entry["logprob"] for entry in entries]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def expected(self, model: torch.nn.Module) -> np.ndarray[Any, Any]:
        """Return ``model``'s logprob of each sampled token, given everything before it."""
        ids = np.asarray(self.prompt_ids + self.token_ids)
        with torch.no_grad():
            return score_sequence(model, ids).numpy()[-len(self.token_ids) :]


def frozen_reply(
    control: VllmControl, *, base_url: str | None = None, clear_cache: bool = False
) -> tuple[Reply, int]:
    """A reply paused (``keep``) once it has begun, long before its end; and its tokens so far.

    It is asked for at ``base_url``, else of the engine itself.
    """
    for _ in range(5):
        reply = Reply(base_url or control.base_url)
        reply.start()
        until(lambda: len(reply.token_ids) >= 20, 60)  # noqa: B023 - called before the next turn
        control.pause("keep", clear_cache=clear_cache)
        time.sleep(0.3)
        if len(reply.token_ids) < LENGTH - 20:
            return reply, len(reply.token_ids)
        control.resume()  # The machine was too busy to see it begin before it was over.
        reply.join(60)
    pytest.fail("no reply could be paused before its end")


@pytest.fixture
def newer(vllm_servers: Any, tmp_path: Path) -> tuple[Path, torch.nn.Module, torch.nn.Module]:
    """Other weights for the served policy: their directory, and the models of before and after."""
    origin = vllm_servers.model_dir("tied")
    old, new = load_policy(origin), load_policy(origin)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    save_policy(new, tmp_path / "newer", origin)
    return tmp_path / "newer", old, new


@pytest.fixture
def control(vllm_servers: Any) -> Any:
    server = vllm_servers.use("tied")
    with VllmTransfer(server.base_url) as control:
        yield control
        control.pause("abort")
        control.reload_weights(vllm_servers.model_dir("tied"))
        control.resume()


@pytest.mark.parametrize("through", ["directory", "transfer"])
@pytest.mark.sampled(2)
def test_keep_changes_the_version_at_the_token_where_the_stream_stood(
    control: VllmTransfer, newer: tuple[Path, torch.nn.Module, torch.nn.Module], through: str
) -> None:
    directory, old, new = newer
    reply, stood = frozen_reply(control, clear_cache=True)
    if through == "transfer":
        control.send(checkpoint_tensors(new))
    time.sleep(0.3)
    assert len(reply.token_ids) == stood, "frozen"
    if through == "transfer":
        control.load_weights(1)
    else:
        control.reload_weights(directory)
    control.resume()
    reply.join(120)
    assert reply.error is None
    assert len(reply.stream_ids) == 1
    assert len(reply.token_ids) == LENGTH
    logprobs = np.asarray(reply.logprobs)
    by_old, by_new = (np.abs(logprobs - reply.expected(model)) for model in (old, new))
    assert by_old[:stood].mean() <= 1e-3
    assert by_new[stood:].mean() <= 1e-3
    # Each side is wrong about the other's tokens, so the boundary is where it was seen.
    assert by_old[stood:].mean() > 0.01
    assert by_new[:stood].mean() > 0.01


@pytest.mark.sampled(0)
def test_keep_without_clearing_mixes_old_keys_into_new_tokens(
    control: VllmControl, newer: tuple[Path, torch.nn.Module, torch.nn.Module]
) -> None:
    """Such logprobs are no policy's, so a publish always clears the cache."""
    directory, old, new = newer
    reply, stood = frozen_reply(control)
    control.reload_weights(directory)
    control.resume()
    reply.join(120)
    logprobs = np.asarray(reply.logprobs)
    for model in (old, new):
        assert np.abs(logprobs - reply.expected(model))[stood:].mean() > 1e-3


@pytest.mark.sampled(0)
def test_wait_lets_a_reply_end_with_the_weights_that_it_began_with(
    control: VllmControl, newer: tuple[Path, torch.nn.Module, torch.nn.Module]
) -> None:
    directory, old, _ = newer
    reply, _ = frozen_reply(control)
    control.resume()
    control.pause("wait")
    control.reload_weights(directory)
    control.resume()
    reply.join(120)
    assert len(reply.token_ids) == LENGTH
    assert np.abs(np.asarray(reply.logprobs) - reply.expected(old)).mean() <= 1e-3


def test_abort_ends_a_reply_with_what_it_has(
    control: VllmControl, newer: tuple[Path, torch.nn.Module, torch.nn.Module]
) -> None:
    directory, old, _ = newer
    reply, _ = frozen_reply(control)
    control.pause("abort")
    reply.join(120)
    control.reload_weights(directory)
    control.resume()
    assert reply.error is None
    assert reply.finish_reason == "abort"
    assert 20 <= len(reply.token_ids) < LENGTH
    assert len(reply.logprobs) == len(reply.token_ids)
    assert np.abs(np.asarray(reply.logprobs) - reply.expected(old)).mean() <= 1e-3


def test_one_recorded_call_carries_both_versions_from_the_token_where_the_engine_changed(
    control: VllmControl, newer: tuple[Path, torch.nn.Module, torch.nn.Module], tmp_path: Path
) -> None:
    directory, old, new = newer
    settings = ProxySettings(control.base_url, str(tmp_path / "bridle.db"))
    with ProxyServer(settings, grace_s=1) as server:
        reply, _ = frozen_reply(control, base_url=f"{server.base_url}/s/work", clear_cache=True)
        control.reload_weights(directory)
        announced = httpx.put(
            f"{server.base_url}/bridle/v1/policy", json={"version": 1}, trust_env=False
        )
        assert announced.is_success, announced.text
        control.resume()
        reply.join(120)
    assert reply.error is None

    with Reader(str(tmp_path / "bridle.db")) as store:
        (session,) = store.sessions()
        *_, call = store.calls(session.id)
        assert (call.version_start, call.version_end) == (0, 1)
        (choice,) = store.sampled(call.id)
        assert [run.version for run in choice.versions] == [0, 1]
        change = choice.versions[1].start
        assert store.prompt_token_ids(call.id).tolist() == reply.prompt_ids
        assert choice.token_ids.tolist() == reply.token_ids
        assert len(choice.token_ids) == LENGTH
        by_old, by_new = (
            np.abs(np.asarray(choice.logprobs) - reply.expected(model)) for model in (old, new)
        )
        assert by_old[:change].max() <= 1e-3
        assert by_new[change:].max() <= 1e-3
        # One token to either side the other weights are plainly seen.
        assert by_old[change:].mean() > 0.01
        assert by_new[:change].mean() > 0.01
        assert all(audited.clean for audited in audit(store))
