"""Weights from memory to our worker: whole or not at all, and what a restart begins with.

vLLM is a stand-in here and its layers are a Transformers model's; the worker, the announcement, the
store and the group are the real ones.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.client import EngineRefused
from engine.vllm import checks
from engine.vllm.inside.bridle_wire import (
    ALIGNMENT,
    Announcement,
    TransferBroken,
    buckets,
    open_store,
    unpacked,
)
from engine.vllm.transfer import TransferFailed, broadcast
from trainer.config import PublishConfig
from trainer.model import checkpoint_tensors, load_policy
from trainer.publish import default_probes, weights_digest, write_version
from trainer.swap import PublishError
from trainer.tiny import TinyShape, make_policy
from trainer.transfer import TransferPublisher

SHAPE = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=128)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy") / "v0"
    make_policy(directory, SHAPE, vocab_size=64, seed=3)
    return directory


def moved(directory: Path, seed: int = 1) -> Any:
    """A later version of the policy in ``directory``."""
    model = load_policy(directory)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def values(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def announced(tensors: Mapping[str, Tensor], **more: Any) -> Announcement:
    described = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors.items()
    ]
    given = {"address": "127.0.0.1", "port": 0, "world_size": 2, "backend": "gloo"}
    limits = {"bucket_bytes": 1 << 20, "stall_seconds": 20.0}
    return Announcement(tensors=described, **{**given, **limits, **more})


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    kinds=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
        min_size=6,
        max_size=6,
    ),
    size=st.integers(1, 300),
)
def test_tensors_of_any_size_travel_in_buckets_of_one_size(
    shapes: list[list[int]], kinds: list[torch.dtype], size: int
) -> None:
    tensors = {
        f"t{number}": torch.randint(0, 2, shape).to(kind)
        for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
    }
    announcement = announced(tensors, bucket_bytes=size)
    sent = [bucket.clone() for bucket in buckets(announcement, tensors.values(), CPU)]
    assert [(end - begin) for begin, end in announcement.spans()] == [len(each) for each in sent]
    assert all(len(each) == size for each in sent[:-1])
    total = sum(map(len, sent))
    assert total == sum(
        math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in tensors.values()
    )
    row = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8)
    assert equal(dict(unpacked(announcement, row)), tensors)


@pytest.mark.parametrize("wrong", [{"backend": "mpi"}, {"tensors": [("a", "float31", [2])]}])
def test_an_announcement_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not 'mpi'|float31"):
        Announcement(**{**asdict(announced({})), **wrong})


def test_weights_arrive_beside_the_served_ones_and_are_loaded_when_that_is_said(
    receiving: Callable[..., Any], policy: Path
) -> None:
    engine = receiving(policy, bucket_bytes=1000)
    old, new = values(engine.loaded.policy), values(moved(policy))
    engine.send(new)
    assert equal(values(engine.loaded.policy), old)
    assert engine.loaded.steps == []
    engine.load_weights(7)
    assert equal(values(engine.loaded.policy), new)
    assert engine.loaded.steps == ["begin", "load", "end"]
    assert engine.version == "7"
    assert engine.worker.loaded == ["encoder cache reset"]
    with pytest.raises(EngineRefused):
        engine.load_weights(8)


def test_matrices_travel_in_the_type_that_is_served(
    receiving: Callable[..., Any], policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, new = receiving(policy), values(moved(policy))
    served = {"model_config": {"dtype": "torch.bfloat16"}}
    monkeypatch.setattr(engine, "_info", served)
    engine.send(new)
    engine.load_weights(1)
    for name, tensor in values(engine.loaded.policy).items():
        rounded = new[name].bfloat16().float() if new[name].dim() > 1 else new[name]
        assert torch.equal(tensor, rounded), name


@pytest.mark.parametrize("wrong", ["missing", "more", "shape"])
def test_tensors_of_another_model_are_refused_before_anything_is_sent(
    receiving: Callable[..., Any], policy: Path, wrong: str
) -> None:
    engine, tensors = receiving(policy), values(moved(policy))
    name = "model.norm.weight"
    if wrong == "missing":
        del tensors[name]
    else:
        tensors[name if wrong == "shape" else "model.extra.weight"] = torch.ones(7)
    with pytest.raises(EngineRefused, match=r"1 tensors differ.*the weights were not changed"):
        engine.send(tensors)
    assert engine.loaded.steps == []


def test_an_engine_that_serves_no_files_has_nothing_to_hold_a_transfer_to(
    receiving: Callable[..., Any], policy: Path
) -> None:
    engine = receiving(policy)
    engine.worker.model_config.model = "some/model"
    with pytest.raises(EngineRefused, match="no safetensors files; the weights were not changed"):
        engine.send(values(moved(policy)))


def test_a_sender_that_breaks_off_leaves_the_old_weights_and_the_next_is_heard(
    receiving: Callable[..., Any], policy: Path
) -> None:
    engine = receiving(policy, bucket_bytes=1000)
    old, new = values(engine.loaded.policy), values(moved(policy))
    store, port = open_store("127.0.0.1", 20.0)
    announcement = announced(new, port=port, bucket_bytes=1000)
    engine.announce_weights(asdict(announcement))

    def cut() -> Iterator[Tensor]:
        yield next(iter(new.values()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broadcast(announcement, store, cut())
    with pytest.raises(EngineRefused, match=r"the transfer broke.*the weights were not changed"):
        engine.require_weights()
    with pytest.raises(EngineRefused):
        engine.load_weights(1)
    assert equal(values(engine.loaded.policy), old)
    engine.send(new)
    engine.load_weights(1)
    assert equal(values(engine.loaded.policy), new)


def test_a_sender_that_never_comes_is_waited_for_no_longer_than_the_limit(
    receiving: Callable[..., Any], policy: Path
) -> None:
    engine, new = receiving(policy), values(moved(policy))
    store, port = open_store("127.0.0.1", 20.0)
    engine.announce_weights(asdict(announced(new, port=port, stall_seconds=1.0)))
    began = time.monotonic()
    with pytest.raises(EngineRefused, match="the group did not form"):
        engine.require_weights()
    assert time.monotonic() - began < 10
    assert engine.loaded.steps == []
    del store


def test_an_engine_that_never_joins_is_waited_for_no_longer_than_the_limit(policy: Path) -> None:
    new = values(moved(policy))
    store, port = open_store("127.0.0.1", 1.0)
    began = time.monotonic()
    with pytest.raises(TransferBroken, match="the group did not form"):
        broadcast(announced(new, port=port, stall_seconds=1.0), store, new.values())
    assert time.monotonic() - began < 10


def test_an_update_that_a_trainer_left_open_does_not_stop_the_next_one(
    receiving: Callable[..., Any], policy: Path
) -> None:
    engine, new = receiving(policy), values(moved(policy, seed=2))
    engine.send(values(moved(policy, seed=1)))
    engine.send(new)
    engine.load_weights(2)
    assert equal(values(engine.loaded.policy), new)


def test_half_loaded_weights_end_the_engine(
    receiving: Callable[..., Any], policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = receiving(policy)
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: ended.append(what))

    def break_off(_tensors: Any) -> None:
        raise RuntimeError("no room")

    engine.loaded.load_weights = break_off
    engine.send(values(moved(policy)))
    with pytest.raises(EngineRefused, match="no room"):
        engine.load_weights(1)
    assert ended == [(os.getpid(), signal.SIGKILL)]


def test_nothing_of_a_transfer_listens_off_loopback() -> None:
    others = checks._own_addresses()
    if not others:
        pytest.skip("this machine has no address but loopback")
    store, port = open_store("127.0.0.1", 5.0)
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((others[0], port), 5)
    del store


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"weight_transfer_config": None}, "start it with `bridle engine vllm`"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "or publish through directories"),
    ],
)
def test_an_engine_that_takes_no_transfers_is_refused_at_once(
    receiving: Callable[..., Any],
    policy: Path,
    monkeypatch: pytest.MonkeyPatch,
    info: dict[str, Any],
    words: str,
) -> None:
    engine = receiving(policy)
    engine.require_transfers()
    monkeypatch.setattr(engine, "_info", info)
    with pytest.raises(EngineRefused, match=words):
        engine.require_transfers()


@pytest.mark.parametrize(
    ("route", "words"),
    [({"address": "0.0.0.0"}, "name this machine's address"), ({"backend": "nccl"}, "gloo")],  # noqa: S104
)
def test_a_route_that_cannot_work_is_refused_at_once(
    receiving: Callable[..., Any], policy: Path, route: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineRefused, match=words):
        receiving(policy, **route).require_transfers()


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[str, str | None]]:
    """What a restart would begin with: directory and version."""
    path = tmp_path / "served.json"
    monkeypatch.setenv("BRIDLE_SERVED_FILE", str(path))

    def read() -> tuple[str, str | None]:
        noted = json.loads(path.read_text())
        return noted["directory"], noted["version"]

    return read


def test_a_restart_begins_with_what_has_a_directory(
    receiving: Callable[..., Any],
    policy: Path,
    tmp_path: Path,
    note: Callable[[], tuple[str, str | None]],
) -> None:
    engine, model = receiving(policy), moved(policy)
    engine.stamp(0)
    engine.send(values(model))
    engine.load_weights(1)
    engine.stamp(1)
    assert note() == (str(policy), "0"), "these weights are nowhere on disk"

    with pytest.raises(EngineRefused, match="no safetensors files"):
        engine.remember_directory(tmp_path / "nowhere", 1)
    path, _ = write_version(tmp_path / "published", model, 1, policy)
    with pytest.raises(EngineRefused, match="version 2 is not served from a transfer"):
        engine.remember_directory(path, 2)
    assert note() == (str(policy), "0")
    engine.remember_directory(path, 1)
    assert note() == (str(path), "1")
    engine.stamp(1)
    assert note() == (str(path), "1")

    engine.start(policy)
    with pytest.raises(EngineRefused, match="version 1 is not served from a transfer"):
        engine.remember_directory(path, 1)


@pytest.fixture
def publisher(
    receiving: Callable[..., Any], policy: Path, tmp_path: Path
) -> Iterator[Callable[..., TransferPublisher]]:
    opened: list[TransferPublisher] = []

    def publisher(*names: str, **more: Any) -> TransferPublisher:
        engines = {name: receiving(policy) for name in names or ("one",)}
        opened.append(
            TransferPublisher(
                engines,
                tmp_path / "published",
                run_id="run",
                served=policy,
                served_version=0,
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
    policy: Path,
    tmp_path: Path,
    note: Callable[[], tuple[str, str | None]],
) -> None:
    recorded: list[Any] = []
    with publisher(record=recorded.append) as publishing:
        for version in (1, 2, 3):
            model = moved(policy, seed=version)
            published = publishing.publish(model, version)
            assert published.verified
            assert published.logprob_gap is not None
            assert published.logprob_gap <= 1e-6
            assert publishing.serves(model)
    _, digest = write_version(tmp_path / "other", moved(policy, seed=3), 3, policy)
    path = tmp_path / "published" / "v00000003"
    assert weights_digest(path) == digest
    assert (recorded[-1].version, recorded[-1].path, recorded[-1].digest) == (3, str(path), digest)
    assert [each.version for each in recorded] == [1, 1, 2, 2, 3, 3]
    assert sorted(each.name for each in path.parent.iterdir()) == ["v00000002", "v00000003"]
    assert note() == (str(path), "3")


def test_weights_that_score_wrong_are_taken_back_to_the_version_before(
    publisher: Callable[..., TransferPublisher], policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []
    publishing = publisher(record=recorded.append)
    engine: Any = publishing.engines["one"]
    first = moved(policy, seed=1)
    publishing.publish(first, 1)
    send = engine.send

    def falsify(tensors: Mapping[str, Tensor]) -> None:
        monkeypatch.setattr(engine, "send", send)
        send({name: tensor * 1.5 for name, tensor in tensors.items()})

    monkeypatch.setattr(engine, "send", falsify)
    with pytest.raises(PublishError, match="the engine serves version 1 again"):
        publishing.publish(moved(policy, seed=2), 2)
    assert equal(values(engine.loaded.policy), values(first))
    assert engine.version == "1"
    assert (recorded[-1].version, recorded[-1].verified) == (2, False)
    publishing.publish(moved(policy, seed=3), 3)
    assert publishing.served_version == 3


def test_a_transfer_that_breaks_changes_nothing_and_needs_no_way_back(
    publisher: Callable[..., TransferPublisher], policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retracted: list[int] = []
    publishing = publisher(retract=retracted.append)
    engine: Any = publishing.engines["one"]
    old = values(engine.loaded.policy)

    def broken(_tensors: Mapping[str, Tensor]) -> None:
        raise TransferFailed("the transfer broke: gone; the weights were not changed")

    monkeypatch.setattr(engine, "send", broken)
    with pytest.raises(PublishError, match="no engine serves version 1: one: the transfer broke"):
        publishing.publish(moved(policy), 1)
    assert equal(values(engine.loaded.policy), old)
    assert engine.loaded.steps == []
    assert retracted == [0]
    assert publishing.served_version == 0


def test_of_several_engines_one_that_fails_is_left_behind(
    publisher: Callable[..., TransferPublisher], policy: Path
) -> None:
    publishing = publisher("one", "two")
    broken: Any = publishing.engines["two"]
    broken.worker.model_config.model = "nowhere"
    model = moved(policy)
    publishing.publish(model, 1)
    assert list(publishing.lagging) == ["two"]
    assert publishing.serves(model), "of those in rotation"
    broken.worker.model_config.model = str(policy)
    publishing.publish(moved(policy, seed=2), 2)
    assert publishing.lagging == {}


def test_an_engine_restarted_before_the_directory_serves_the_version_before_and_is_published_to(
    publisher: Callable[..., TransferPublisher],
    policy: Path,
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
    model = moved(policy)
    publishing.publish(model, 1)
    engine.start(Path(note()[0]))
    assert note() == (str(policy), "0")
    assert not publishing.serves(model)
    with caplog.at_level(logging.WARNING):
        written.set()
        publishing.wait_written()
    assert "engine_does_not_know_the_directory" in caplog.text
    assert note() == (str(policy), "0")
    publishing.publish(model, 1)
    publishing.wait_written()
    assert publishing.serves(model)
    assert note()[1] == "1"


def test_a_directory_that_could_not_be_written_is_heard_of_at_the_next_publish(
    publisher: Callable[..., TransferPublisher], policy: Path, tmp_path: Path
) -> None:
    publishing = publisher(config=PublishConfig(keep=1))
    (tmp_path / "published").write_text("in the way")
    publishing.publish(moved(policy), 1)
    with pytest.raises(FileExistsError):
        publishing.publish(moved(policy, seed=2), 2)
    assert np.isfinite(publishing.engines["one"].score([1, 2, 3])).all()


@pytest.mark.gpu
def test_nccl_carries_weights_from_one_gpu_to_another(
    inside: Callable[[str], ModuleType], policy: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU on either side: two CUDA devices")
    new = {name: tensor.to("cuda:0") for name, tensor in values(moved(policy)).items()}
    store, port = open_store("127.0.0.1", 60.0)
    announcement = announced(new, port=port, backend="nccl", bucket_bytes=1000)
    theirs = inside("bridle_wire").Announcement(**asdict(announcement))
    incoming = inside("bridle_transfer").Incoming(theirs, 1, torch.device("cuda:1"))
    broadcast(announcement, store, new.values())
    assert equal(dict(incoming.tensors()), {name: each.cpu() for name, each in new.items()})
