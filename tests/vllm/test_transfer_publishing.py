"""Versions published by transfer: verified, taken back, and written down afterwards.

vLLM is a stand-in here, as in ``test_transfer.py``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from bridle.engine.vllm.transfer import TransferFailed
from bridle.store.records import PolicyRecord
from bridle.trainer.config import PublishConfig
from bridle.trainer.publish.publisher import default_probes, weights_digest, write_version
from bridle.trainer.publish.swap import PublishError
from bridle.trainer.publish.transfer import TransferPublisher


@pytest.fixture
def publisher(
    receiving: Callable[..., Any], weights: Any, tmp_path: Path
) -> Iterator[Callable[..., TransferPublisher]]:
    opened: list[TransferPublisher] = []

    def publisher(*names: str, **more: Any) -> TransferPublisher:
        engines = {name: receiving(weights.first) for name in names or ("one",)}
        opened.append(
            TransferPublisher(
                engines,
                tmp_path / "published",
                serving=PolicyRecord("run", 0, 0.0, path=str(weights.first)),
                probes=default_probes(64),
                announce=lambda version, name: engines[name].stamp(version),
                **more,
            )
        )
        return opened[-1]

    yield publisher
    for each in opened:
        each._background.shutdown()


def test_each_version_is_verified_and_its_directory_is_that_of_a_publish_by_directory(
    publisher: Callable[..., TransferPublisher],
    weights: Any,
    tmp_path: Path,
    note: Callable[[], tuple[str, str | None]],
) -> None:
    recorded: list[Any] = []
    with publisher(record=recorded.append) as publishing:
        for version in (1, 2, 3):
            model = weights.moved(seed=version)
            published = publishing.publish(model, version)
            assert published.verified
            assert published.logprob_gap is not None
            assert published.logprob_gap <= 1e-6
            assert publishing.serves(model)
    _, digest = write_version(tmp_path / "other", weights.moved(seed=3), 3, weights.first)
    path = tmp_path / "published" / "v00000003"
    assert weights_digest(path) == digest
    assert (recorded[-1].version, recorded[-1].path, recorded[-1].digest) == (3, str(path), digest)
    assert [each.version for each in recorded] == [1, 1, 2, 2, 3, 3]
    assert sorted(each.name for each in path.parent.iterdir()) == ["v00000002", "v00000003"]
    assert note() == (str(path), "3")


def test_weights_that_score_wrong_are_taken_back_to_the_version_before(
    publisher: Callable[..., TransferPublisher], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []
    publishing = publisher(record=recorded.append)
    engine: Any = publishing.engines["one"]
    first = weights.moved(seed=1)
    publishing.publish(first, 1)
    send = engine.send

    def falsify(tensors: Mapping[str, Tensor]) -> None:
        monkeypatch.setattr(engine, "send", send)
        send({name: tensor * 1.5 for name, tensor in tensors.items()})

    monkeypatch.setattr(engine, "send", falsify)
    with pytest.raises(PublishError, match="the engine serves version 1 again"):
        publishing.publish(weights.moved(seed=2), 2)
    assert weights.equal(weights.values(engine.loaded.policy), weights.values(first))
    assert engine.version == "1"
    assert (recorded[-1].version, recorded[-1].verified) == (2, False)
    publishing.publish(weights.moved(seed=3), 3)
    assert publishing.served_version == 3


def test_a_transfer_that_breaks_changes_nothing_and_needs_no_way_back(
    publisher: Callable[..., TransferPublisher], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    retracted: list[int] = []
    publishing = publisher(retract=retracted.append)
    engine: Any = publishing.engines["one"]
    old = weights.values(engine.loaded.policy)

    def broken(_tensors: Mapping[str, Tensor]) -> None:
        raise TransferFailed("the transfer broke: gone; the weights were not changed")

    monkeypatch.setattr(engine, "send", broken)
    with pytest.raises(PublishError, match="no engine serves version 1: one: the transfer broke"):
        publishing.publish(weights.moved(), 1)
    assert weights.equal(weights.values(engine.loaded.policy), old)
    assert engine.loaded.steps == []
    assert retracted == [0]
    assert publishing.served_version == 0


def test_of_several_engines_one_that_fails_is_left_behind(
    publisher: Callable[..., TransferPublisher], weights: Any
) -> None:
    publishing = publisher("one", "two")
    broken: Any = publishing.engines["two"]
    broken.worker.model_config.model = "nowhere"
    model = weights.moved()
    publishing.publish(model, 1)
    assert list(publishing.lagging) == ["two"]
    assert publishing.serves(model), "of those in rotation"
    broken.worker.model_config.model = str(weights.first)
    publishing.publish(weights.moved(seed=2), 2)
    assert publishing.lagging == {}


def test_an_engine_restarted_before_the_directory_serves_the_version_before_and_is_published_to(
    publisher: Callable[..., TransferPublisher],
    weights: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    note: Callable[[], tuple[str, str | None]],
) -> None:
    publishing = publisher()
    engine: Any = publishing.engines["one"]
    engine.stamp(0)
    written = threading.Event()
    write = TransferPublisher._write

    def write_later(*arguments: Any) -> None:
        assert written.wait(60)
        write(*arguments)

    monkeypatch.setattr(TransferPublisher, "_write", write_later)
    model = weights.moved()
    publishing.publish(model, 1)
    engine.start(Path(note()[0]))
    assert note() == (str(weights.first), "0")
    assert not publishing.serves(model)
    with caplog.at_level(logging.WARNING):
        written.set()
        publishing.wait_written()
    assert "engine_does_not_know_the_directory" in caplog.text
    assert note() == (str(weights.first), "0")
    publishing.publish(model, 1)
    publishing.wait_written()
    assert publishing.serves(model)
    assert note()[1] == "1"


def test_a_directory_that_could_not_be_written_is_heard_of_at_the_next_publish(
    publisher: Callable[..., TransferPublisher], weights: Any, tmp_path: Path
) -> None:
    publishing = publisher(config=PublishConfig(keep=1))
    (tmp_path / "published").write_text("in the way")
    publishing.publish(weights.moved(), 1)
    with pytest.raises(FileExistsError):
        publishing.publish(weights.moved(seed=2), 2)
    assert np.isfinite(publishing.engines["one"].score([1, 2, 3])).all()
