"""Publishing to the real embedded engine, over HTTP and from memory."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from bridle.engine.contract.client import EngineClient
from bridle.engine.embedded.engine import EmbeddedEngine
from bridle.store.records import PolicyRecord
from bridle.trainer.config import PublishConfig
from bridle.trainer.policy.model import load_policy
from bridle.trainer.publish.publisher import Publisher, default_probes
from bridle.trainer.publish.swap import PublishError


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def directory(request, chat_directory, tmp_path):
    from bridle.recipes.models.tiny import TinyShape, make_policy

    directory = tmp_path / "initial"
    shutil.copytree(chat_directory, directory)
    if not request.param:
        vocabulary = load_policy(chat_directory).config.vocab_size
        shape = TinyShape(hidden=32, layers=2, intermediate=64, context=512, tied=False)
        make_policy(directory, shape, vocab_size=vocabulary, seed=3)
    return directory


@pytest.fixture
def engine(directory):
    with EmbeddedEngine(directory) as engine:
        yield engine


@pytest.fixture
def client(engine):
    with EngineClient(engine.base_url) as client:
        yield client


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


def test_five_publishes_in_a_row_each_agree_by_logprobs(engine, client, directory, tmp_path):
    model = load_policy(directory)
    probes = default_probes(model.config.vocab_size)
    publisher = Publisher(
        client,
        tmp_path / "published",
        serving=PolicyRecord("run", 0, 0.0, path=str(directory)),
        probes=probes,
    )
    seen = [client.score(probes[0].tolist())]
    for version in range(1, 6):
        change(model)
        policy = publisher.publish(model, version)
        assert policy.verified
        assert policy.logprob_gap <= 1e-4
        seen.append(client.score(probes[0].tolist()))
        assert np.abs(seen[-1] - seen[-2]).mean() > 1e-3


def test_weights_that_do_not_match_are_rolled_back(engine, client, directory, tmp_path):
    model = load_policy(directory)
    recorded = []
    publisher = Publisher(
        client,
        tmp_path / "published",
        serving=PolicyRecord("run", 0, 0.0, path=str(directory)),
        probes=default_probes(model.config.vocab_size),
        config=PublishConfig(tolerance=-1.0),
        record=recorded.append,
    )
    before = client.score([1, 2, 3])
    change(model)
    with pytest.raises(PublishError, match="version 0 was put back, but"):
        publisher.publish(model, 1)  # no gap is small enough, not even that of the roll-back
    np.testing.assert_allclose(client.score([1, 2, 3]), before, atol=1e-5)
    assert [policy.verified for policy in recorded] == [False]

    wrong = load_policy(directory)
    wrong.model.norm.weight = torch.nn.Parameter(torch.ones(16))
    publisher.config = dataclasses.replace(publisher.config, tolerance=1e-3)
    with pytest.raises(PublishError, match="could not be loaded"):
        publisher.publish(wrong, 2)
    np.testing.assert_allclose(client.score([1, 2, 3]), before, atol=1e-5)
