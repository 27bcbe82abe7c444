"""The demo with an engine and a proxy that run already, as in the compose set-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bridle.errors import BridleError
from bridle.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from bridle.recipes.demo.run import Demo, Services
from bridle.recipes.demo.settings import settings_of
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import CHATML_TOOLS_TEMPLATE, train_tokenizer
from bridle.run.stack import stack

pytestmark = pytest.mark.loop


def policy(directory: Path, seed: int) -> Path:
    size = train_tokenizer(directory, [CHATML_TOOLS_TEMPLATE], vocab_size=300)
    shape = TinyShape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, context=256)
    make_policy(directory, shape, vocab_size=size, seed=seed)
    return directory


@pytest.mark.sampled(0)
def test_each_stage_has_them_serve_its_own_weights_under_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, trained = policy(tmp_path / "first", 0), policy(tmp_path / "trained", 1)
    store = str(tmp_path / "services.db")
    with stack(first, store, tmp_path / "logs") as running:
        monkeypatch.setenv(API_KEY_VARIABLE, str(running.engine_key))
        monkeypatch.setenv(ADMIN_KEY_VARIABLE, str(running.admin_key))
        services = Services(running.engine_url, running.proxy_url, store)
        demo = Demo(tmp_path / "demo", settings_of("tiny"), Console(), services=services)
        assert demo.places.store == store
        with running.engine() as engine:
            ids = [1, 2, 3, 4]
            before = engine.score(ids)
            with demo._serving(trained, 3) as serving:
                assert serving.kind == "embedded"
                assert serving.version() == 3
                assert not np.array_equal(engine.score(ids), before)
            with demo._serving(first):
                assert serving.version() == 0
                assert np.array_equal(engine.score(ids), before)


def test_services_that_do_not_answer_end_it_with_what_to_do(tmp_path: Path) -> None:
    services = Services("http://127.0.0.1:9", "http://127.0.0.1:9", str(tmp_path / "services.db"))
    demo = Demo(tmp_path / "demo", settings_of("tiny"), Console(), services=services)
    with pytest.raises(BridleError, match="does not answer") as failed, demo._serving(tmp_path):
        pass
    assert "the same command resumes" in "".join(failed.value.__notes__)
