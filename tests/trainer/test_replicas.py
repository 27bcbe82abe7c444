"""Several engines are published to as to one, and one that fails is left behind, not served."""

import shutil
import threading

import numpy as np
import pytest
import torch

from bridle.engine.contract.client import EngineRefused, EngineUnreachable
from bridle.store.records import PolicyRecord
from bridle.trainer.policy.model import load_policy, score_sequence
from bridle.trainer.publish.publisher import default_probes
from bridle.trainer.publish.replicas import ReplicaPublisher
from bridle.trainer.publish.swap import PublishError

LOADING = threading.Lock()
"""Transformers loads one model at a time; real engines load in processes of their own."""


class LocalEngine:
    """Scores with what it last loaded, and can be away, refuse, or go on serving old weights."""

    def __init__(self, directory, together=None):
        self.model = load_policy(directory)
        self.paused = self.away = self.refuses = self.stale = False
        self.together = together

    def pause(self, mode="wait", clear_cache=True):
        self.reached()
        self.paused = True

    def resume(self):
        self.reached()
        self.paused = False

    def is_paused(self):
        self.reached()
        return self.paused

    def reload_weights(self, directory):
        self.reached()
        if self.together is not None:
            self.together.wait(20)
        if self.refuses:
            raise EngineRefused("no room", status=500)
        if not self.stale:
            with LOADING:
                self.model = load_policy(directory)

    @torch.no_grad()
    def score(self, token_ids):
        self.reached()
        assert not self.paused
        return score_sequence(self.model, np.asarray(token_ids)).numpy()

    def reached(self):
        if self.away:
            raise EngineUnreachable("nothing listens there")


@pytest.fixture
def setup(policy_directory, tmp_path):
    served = tmp_path / "initial"
    shutil.copytree(policy_directory, served)
    engines = {name: LocalEngine(served) for name in ("one", "two", "three")}
    heard, recorded = [], []
    publisher = ReplicaPublisher(
        engines,
        tmp_path / "published",
        serving=PolicyRecord("run", 3, 0.0, path=str(served)),
        probes=default_probes(64),
        announce=lambda version, name: heard.append((version, name)),
        retract=lambda version: heard.append((version, None)),
        record=recorded.append,
    )
    model = load_policy(policy_directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return publisher, engines, model, heard, recorded


def test_all_engines_change_over_at_the_same_time_and_each_is_verified(setup):
    publisher, engines, model, heard, recorded = setup
    together = threading.Barrier(3)
    for engine in engines.values():
        engine.together = together
    policy = publisher.publish(model, 4)
    assert sorted(heard) == [(4, "one"), (4, "three"), (4, "two")]
    assert recorded == [policy]
    assert policy.verified
    assert policy.logprob_gap <= 1e-6
    assert publisher.lagging == {}
    assert publisher.serves(model)


@pytest.mark.parametrize("how", ["away", "refuses", "stale"])
def test_one_that_fails_lags_and_the_others_serve_the_new_version(setup, how):
    publisher, engines, model, heard, _ = setup
    setattr(engines["two"], how, True)
    policy = publisher.publish(model, 4)
    assert policy.verified
    assert publisher.served_version == 4
    assert list(publisher.lagging) == ["two"]
    assert [version for version, name in heard if name == "two"][-1:] != [4]
    assert publisher.serves(model), "of those in rotation"

    setattr(engines["two"], how, False)
    publisher.publish(model, 5)
    assert publisher.lagging == {}
    assert [version for version, name in heard if name == "two"][-1] == 5


def test_when_no_engine_takes_it_all_serve_the_version_before_and_that_is_said(setup):
    publisher, engines, model, heard, recorded = setup
    for engine in engines.values():
        engine.stale = True
    with pytest.raises(PublishError, match="no engine serves version 4: one: "):
        publisher.publish(model, 4)
    assert heard[-1] == (3, None)
    assert publisher.served_version == 3
    assert [policy.verified for policy in recorded] == [False]
    assert not publisher.serves(model)


def test_an_engine_of_the_rotation_that_went_away_is_noticed(setup):
    publisher, engines, model, _, _ = setup
    publisher.publish(model, 4)
    engines["one"].away = True
    assert not publisher.serves(model)
