"""Weights are published only when the engine's own numbers say so."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from bridle.engine.contract.client import EngineRefused, EngineUnreachable
from bridle.store.records import PolicyRecord
from bridle.trainer.config import ComputeConfig, LoraConfig, PublishConfig
from bridle.trainer.policy.model import (
    checkpoint_tensors,
    load_policy,
    save_policy,
    score_sequence,
    trainable_policy,
)
from bridle.trainer.publish.publisher import Publisher, default_probes, weights_digest
from bridle.trainer.publish.swap import TOLERANCE, TOLERANCE_IN_BFLOAT16, PublishError


class LocalEngine:
    """An engine without HTTP: it scores with what it last loaded, and can be made to misbehave."""

    def __init__(self, directory: Path) -> None:
        self.model = load_policy(directory)
        self.log: list[str] = []
        self.stale = False
        self.refuse: set[str] = set()
        self.poison = 0.0

    def pause(self, mode="wait", clear_cache=True):
        self.log.append(f"pause {mode}")

    def resume(self):
        self.log.append("resume")

    def is_paused(self):
        changes = [line for line in self.log if line == "resume" or line.startswith("pause")]
        return changes[-1:] not in ([], ["resume"])

    def reload_weights(self, directory):
        self.log.append(f"reload {Path(directory).name}")
        if Path(directory).name in self.refuse:
            raise EngineRefused("no such layer", status=500)
        if not self.stale:
            self.model = load_policy(directory)

    @torch.no_grad()
    def score(self, token_ids):
        assert not self.is_paused()
        return score_sequence(self.model, np.asarray(token_ids)).numpy() + np.float32(self.poison)


@pytest.fixture
def setup(policy_directory, tmp_path):
    served = tmp_path / "initial"
    shutil.copytree(policy_directory, served)
    engine = LocalEngine(served)
    announced, recorded = [], []

    def announce(version):
        engine.log.append(f"announce {version}")
        announced.append(version)

    publisher = Publisher(
        engine,
        tmp_path / "published",
        serving=PolicyRecord("run", 3, 0.0, path=str(served)),
        probes=default_probes(64),
        config=PublishConfig(keep=2),
        announce=announce,
        record=recorded.append,
    )
    model = load_policy(policy_directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return publisher, engine, model, announced, recorded


def test_a_publish_reloads_while_paused_and_is_verified_by_logprobs(setup):
    publisher, engine, model, announced, recorded = setup
    policy = publisher.publish(model, 4)
    assert engine.log == ["pause wait", "reload v00000004", "announce 4", "resume"]
    assert announced == [4]
    assert recorded == [policy]
    assert policy.verified
    assert policy.logprob_gap <= 1e-6
    assert policy.digest == weights_digest(Path(policy.path))
    assert (publisher.served, publisher.served_version) == (Path(policy.path), 4)
    for expected, found in zip(model.parameters(), engine.model.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_an_engine_that_was_restarted_with_other_weights_is_noticed(setup):
    publisher, engine, model, _, _ = setup
    assert not publisher.serves(model)
    publisher.publish(model, 4)
    assert publisher.serves(model)
    engine.model = load_policy(publisher._origin)
    assert not publisher.serves(model)


def test_an_engine_that_a_dead_trainer_left_paused_is_published_to_unasked(setup):
    publisher, engine, model, _, _ = setup
    engine.pause("keep")
    assert not publisher.serves(model)
    assert publisher.publish(model, 4).verified
    assert engine.log == ["pause keep", "pause wait", "reload v00000004", "announce 4", "resume"]


def test_what_an_engine_left_paused_is_given_back_cannot_be_checked_and_that_is_said(setup):
    publisher, engine, model, _, _ = setup
    engine.pause()
    engine.stale = True
    with pytest.raises(PublishError, match=r"nothing tells how it should score: restart"):
        publisher.publish(model, 4)
    assert not engine.is_paused()


def test_an_engine_that_serves_stale_weights_is_found_out_and_given_the_old_ones_again(setup):
    publisher, engine, model, announced, recorded = setup
    engine.stale = True
    with pytest.raises(PublishError, match=r"more than 1e-03; the engine serves version 3 again"):
        publisher.publish(model, 4)
    assert engine.log[-4:] == ["pause wait", "reload initial", "announce 3", "resume"]
    assert announced == [4, 3]
    assert not recorded[0].verified
    assert recorded[0].logprob_gap > 1e-3
    assert publisher.served_version == 3


def test_an_engine_in_bfloat16_is_no_match_for_a_trainer_in_float32_and_that_is_suggested(setup):
    publisher, engine, model, _, _ = setup
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4)
        model.get_output_embeddings().weight.mul_(8)
    loads = engine.reload_weights

    def reload(directory):
        loads(directory)
        engine.model.to(torch.bfloat16)

    engine.reload_weights = reload
    with pytest.raises(PublishError, match=r"more than 1e-03; they may compute in different prec"):
        publisher.publish(model, 4)


def in_16_bits(policy_directory, directory):
    """The policy as a directory in bfloat16 but for one norm, as some families have it."""
    model = load_policy(policy_directory)
    model.to(torch.bfloat16).model.norm.float()
    save_policy(model, directory)
    return directory


def trained(directory, precision):
    compute = ComputeConfig(device="cpu", precision=precision)
    model = trainable_policy(directory, compute, LoraConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_policy_in_16_bits_is_published_in_them_where_it_is_served_so(
    policy_directory, tmp_path, precision
):
    origin = in_16_bits(policy_directory, tmp_path / "origin")
    served = getattr(torch, precision)
    engine = LocalEngine(origin)
    loads = engine.reload_weights

    def reload(directory):
        loads(directory)
        engine.model.to(served)

    engine.reload_weights = reload
    publisher = Publisher(
        engine,
        tmp_path / "published",
        serving=PolicyRecord("run", 0, 0.0, path=str(origin)),
        probes=default_probes(64),
    )
    model = trained(origin, precision)
    record = publisher.publish(model, 1)
    assert record.verified
    assert record.logprob_gap <= (TOLERANCE if precision == "float32" else TOLERANCE_IN_BFLOAT16)
    published = load_file(Path(record.path) / "model.safetensors")
    expected = checkpoint_tensors(model)
    norm = "model.norm.weight"
    for name, tensor in expected.items():
        kept = torch.float32 if name == norm else served
        assert torch.equal(published[name], tensor.to(kept)), name
        assert published[name].dtype is kept
    config = AutoConfig.from_pretrained(record.path)
    assert config.dtype is served
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_an_engine_that_refuses_the_weights_keeps_the_old_ones(setup):
    publisher, engine, model, announced, recorded = setup
    engine.refuse.add("v00000004")
    with pytest.raises(PublishError, match=r"no such layer.*serves version 3 again"):
        publisher.publish(model, 4)
    assert announced == [3]
    assert recorded[0].logprob_gap is None
    publisher.publish(model, 5)
    assert publisher.served_version == 5


def test_a_roll_back_that_fails_says_that_the_engine_must_be_restarted(setup):
    publisher, engine, model, _, _ = setup
    engine.refuse |= {"v00000004", "initial"}
    with pytest.raises(PublishError, match=r"could not be put back either.*restart the engine"):
        publisher.publish(model, 4)


def test_a_roll_back_is_verified_too(setup):
    publisher, engine, model, _, _ = setup
    original = engine.reload_weights

    def break_on_reload(directory):
        original(directory)
        engine.poison = 0.5

    engine.reload_weights = break_on_reload
    with pytest.raises(PublishError, match="does not score as it did before"):
        publisher.publish(model, 4)


def test_scores_that_are_not_numbers_are_not_agreement(setup):
    publisher, engine, model, _, recorded = setup
    engine.poison = float("nan")
    with pytest.raises(PublishError):
        publisher.publish(model, 4)
    assert not recorded[0].verified


def test_nothing_is_touched_when_the_engine_is_away(setup):
    publisher, engine, model, announced, recorded = setup

    def away(_token_ids):
        raise EngineUnreachable("gone")

    engine.score = away
    with pytest.raises(EngineUnreachable):
        publisher.publish(model, 4)
    assert (announced, recorded, engine.log) == ([], [], [])
    assert not publisher.directory.exists()


def test_old_versions_are_removed_but_never_the_served_one(setup):
    publisher, engine, model, _, _ = setup
    for version in range(4, 8):
        publisher.publish(model, version)
    names = sorted(path.name for path in publisher.directory.iterdir())
    assert names == ["v00000006", "v00000007"]
    engine.stale = True
    torch.nn.init.normal_(model.model.norm.weight)
    for version in (8, 9, 10):
        with pytest.raises(PublishError):
            publisher.publish(model, version)
    assert publisher.served.exists()


@pytest.mark.parametrize("error", [RuntimeError("the proxy is away"), KeyboardInterrupt()])
def test_weights_whose_version_cannot_be_announced_do_not_stay(setup, error):
    publisher, _, model, announced, recorded = setup
    announce = publisher._swap._announce

    def fails_once(version):
        publisher._swap._announce = announce
        raise error

    publisher._swap._announce = fails_once
    with pytest.raises(type(error)) as raised:
        publisher.publish(model, 4)
    assert raised.value.__notes__ == ["the engine serves version 3 again"]
    assert (announced, recorded) == ([3], [])
    assert publisher.served_version == 3


def test_an_engine_whose_pause_took_too_long_is_not_left_paused(setup, monkeypatch):
    publisher, engine, model, _, _ = setup
    pause = engine.pause

    def times_out(mode="wait", clear_cache=True):
        pause(mode)
        raise EngineUnreachable("POST /pause: ReadTimeout")

    monkeypatch.setattr(engine, "pause", times_out)
    with pytest.raises(PublishError, match="ReadTimeout"):
        publisher.publish(model, 4)
    assert not engine.is_paused()
