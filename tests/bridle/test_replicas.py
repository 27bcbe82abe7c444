"""Two engines behind one proxy are published to as one; what lags gets no calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bridle.engine.embedded import EmbeddedEngine
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.stack import Stack
from bridle.store.reading.queries import Reader
from bridle.store.records import PolicyRecord
from bridle.trainer.policy.model import load_policy, vocabulary_size
from bridle.trainer.publish.publisher import default_probes
from bridle.trainer.publish.replicas import ReplicaPublisher

QUESTION = [{"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas") / "policy"
    size = train_tokenizer(directory, ["one of several and several as one"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=size, seed=3)
    return directory


@pytest.fixture
def engines(policy: Path) -> Iterator[list[EmbeddedEngine]]:
    with EmbeddedEngine(policy) as one, EmbeddedEngine(policy) as other:
        yield [one, other]


def test_a_lagging_engine_is_out_of_rotation_until_a_publish_reaches_it(
    policy: Path, engines: list[EmbeddedEngine], store: str, tmp_path: Path
) -> None:
    urls = [each.base_url for each in engines]
    settings = ProxySettings(urls[0], store, more_engines=(urls[1],), tokenizer_dir=policy)
    model = load_policy(policy)

    def step() -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    with ProxyServer(settings) as proxy:
        stack = Stack(urls[0], proxy.base_url, more_engines=(urls[1],))

        def usable() -> list[tuple[int, bool]]:
            url = f"{proxy.base_url}/bridle/v1/engines"
            found = {each["url"]: each for each in httpx.get(url, trust_env=False).json()}
            return [(found[url]["policy_version"], found[url]["usable"]) for url in urls]

        with stack.engine(urls[0]) as first, stack.engine(urls[1]) as second:
            reached = {urls[0]: first, urls[1]: second}
            publisher = ReplicaPublisher(
                reached,
                tmp_path / "published",
                serving=PolicyRecord("run", 0, 0.0, path=str(policy)),
                probes=default_probes(vocabulary_size(model)),
                announce=stack.announce,
                retract=stack.retract,
            )
            publisher.publish(step(), 1)
            assert usable() == [(1, True), (1, True)]

            reload, second.reload_weights = second.reload_weights, lambda _directory: None
            publisher.publish(step(), 2)
            assert list(publisher.lagging) == [urls[1]]
            assert usable() == [(2, True), (1, False)]
            for session in range(4):
                body = {"model": "x", "messages": QUESTION, "max_tokens": 4}
                url = f"{proxy.base_url}/s/{session}/v1/chat/completions"
                assert httpx.post(url, json=body, timeout=30, trust_env=False).is_success

            second.reload_weights = reload
            publisher.publish(step(), 3)
            assert usable() == [(3, True), (3, True)]
    with Reader(store) as reader:
        calls = [call for each in reader.sessions() for call in reader.calls(each.id)]
        assert {(call.version_start, call.version_end) for call in calls} == {(2, 2)}
