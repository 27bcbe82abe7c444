"""Weights from memory to our worker: whole or not at all, and what a restart begins with.

vLLM is a stand-in here and its layers are a Transformers model's; the worker, the announcement, the
store and the group are the real ones.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bridle.engine.contract.client import EngineError, EngineRefused
from bridle.engine.vllm import checks
from bridle.engine.vllm.inside.bridle_wire import (
    ALIGNMENT,
    Announcement,
    TransferBroken,
    buckets,
    open_store,
    unpacked,
)
from bridle.engine.vllm.transfer import broadcast
from bridle.trainer.publish.publisher import write_version

CPU = torch.device("cpu")


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
    found = unpacked(announcement, row)
    assert [name for name, _ in found] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found)


@pytest.mark.parametrize("wrong", [{"backend": "mpi"}, {"tensors": [("a", "float31", [2])]}])
def test_an_announcement_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not 'mpi'|float31"):
        Announcement(**{**asdict(announced({})), **wrong})


def test_weights_arrive_beside_the_served_ones_and_are_loaded_when_that_is_said(
    receiving: Callable[..., Any], weights: Any
) -> None:
    engine = receiving(weights.first, bucket_bytes=1000)
    old, new = weights.values(engine.loaded.policy), weights.values(weights.moved())
    engine.send(new)
    assert weights.equal(weights.values(engine.loaded.policy), old)
    assert engine.loaded.steps == []
    engine.load_weights(7)
    assert weights.equal(weights.values(engine.loaded.policy), new)
    assert engine.loaded.steps == ["begin", "load", "end"]
    assert engine.version == "7"
    assert engine.worker.loaded == ["encoder cache reset"]
    with pytest.raises(EngineRefused):
        engine.load_weights(8)


def test_matrices_travel_in_the_type_that_is_served(
    receiving: Callable[..., Any], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, new = receiving(weights.first), weights.values(weights.moved())
    served = {"model_config": {"dtype": "torch.bfloat16"}}
    monkeypatch.setattr(engine, "_info", served)
    engine.send(new)
    engine.load_weights(1)
    for name, tensor in weights.values(engine.loaded.policy).items():
        rounded = new[name].bfloat16().float() if new[name].dim() > 1 else new[name]
        assert torch.equal(tensor, rounded), name


@pytest.mark.parametrize("wrong", ["missing", "more", "shape"])
def test_tensors_of_another_model_are_refused_before_anything_is_sent(
    receiving: Callable[..., Any], weights: Any, wrong: str
) -> None:
    engine, tensors = receiving(weights.first), weights.values(weights.moved())
    name = "model.norm.weight"
    if wrong == "missing":
        del tensors[name]
    else:
        tensors[name if wrong == "shape" else "model.extra.weight"] = torch.ones(7)
    with pytest.raises(EngineRefused, match=r"1 tensors differ.*the weights were not changed"):
        engine.send(tensors)
    assert engine.loaded.steps == []


def test_an_engine_that_serves_no_files_has_nothing_to_hold_a_transfer_to(
    receiving: Callable[..., Any], weights: Any
) -> None:
    engine = receiving(weights.first)
    engine.worker.model_config.model = "some/model"
    with pytest.raises(EngineRefused, match="no safetensors files; the weights were not changed"):
        engine.send(weights.values(weights.moved()))


def test_a_sender_that_breaks_off_leaves_the_old_weights_and_the_next_is_heard(
    receiving: Callable[..., Any], weights: Any
) -> None:
    engine = receiving(weights.first, bucket_bytes=1000)
    old, new = weights.values(engine.loaded.policy), weights.values(weights.moved())
    store, port = open_store("127.0.0.1", 20.0)
    announcement = announced(new, port=port, bucket_bytes=1000)
    engine.announce_weights(asdict(announcement))

    def cut() -> Iterator[Tensor]:
        yield next(iter(new.values()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broadcast(announcement, store, cut(), engine.require_weights)
    with pytest.raises(EngineRefused, match=r"the transfer broke.*the weights were not changed"):
        engine.require_weights()
    with pytest.raises(EngineRefused):
        engine.load_weights(1)
    assert weights.equal(weights.values(engine.loaded.policy), old)
    engine.send(new)
    engine.load_weights(1)
    assert weights.equal(weights.values(engine.loaded.policy), new)


def test_a_sender_that_never_comes_is_waited_for_no_longer_than_the_limit(
    receiving: Callable[..., Any], weights: Any
) -> None:
    engine, new = receiving(weights.first), weights.values(weights.moved())
    store, port = open_store("127.0.0.1", 20.0)
    engine.announce_weights(asdict(announced(new, port=port, stall_seconds=1.0)))
    began = time.monotonic()
    with pytest.raises(EngineRefused, match="the group did not form"):
        engine.require_weights()
    assert time.monotonic() - began < 10
    assert engine.loaded.steps == []
    del store


def test_an_engine_that_never_joins_is_waited_for_no_longer_than_the_limit(weights: Any) -> None:
    new = weights.values(weights.moved())
    store, port = open_store("127.0.0.1", 1.0)
    began = time.monotonic()
    with pytest.raises(TransferBroken, match="the group did not form"):
        broadcast(announced(new, port=port, stall_seconds=1.0), store, new.values(), lambda: None)
    assert time.monotonic() - began < 10


def test_an_update_that_a_trainer_left_open_does_not_stop_the_next_one(
    receiving: Callable[..., Any], weights: Any
) -> None:
    engine, new = receiving(weights.first), weights.values(weights.moved(seed=2))
    engine.send(weights.values(weights.moved(seed=1)))
    engine.send(new)
    engine.load_weights(2)
    assert weights.equal(weights.values(engine.loaded.policy), new)


def test_half_loaded_weights_end_the_engine(
    receiving: Callable[..., Any], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = receiving(weights.first)
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: ended.append(what))

    def break_off(_tensors: Any) -> None:
        raise RuntimeError("no room")

    engine.loaded.load_weights = break_off
    engine.send(weights.values(weights.moved()))
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
    weights: Any,
    monkeypatch: pytest.MonkeyPatch,
    info: dict[str, Any],
    words: str,
) -> None:
    engine = receiving(weights.first)
    engine.require_transfers()
    monkeypatch.setattr(engine, "_info", info)
    with pytest.raises(EngineRefused, match=words):
        engine.require_transfers()


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ({"address": "0.0.0.0"}, "name this machine's address"),  # noqa: S104
        ({"address": "192.0.2.1"}, "nothing can listen on 192.0.2.1"),
        ({"backend": "nccl"}, "nccl needs a GPU on both sides"),
    ],
)
def test_a_route_that_cannot_work_is_refused_at_once(
    receiving: Callable[..., Any], weights: Any, route: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        receiving(weights.first, **route).require_transfers()


def test_a_restart_begins_with_what_has_a_directory(
    receiving: Callable[..., Any],
    weights: Any,
    tmp_path: Path,
    note: Callable[[], tuple[str, str | None]],
) -> None:
    engine, model = receiving(weights.first), weights.moved()
    engine.stamp(0)
    engine.send(weights.values(model))
    engine.load_weights(1)
    engine.stamp(1)
    assert note() == (str(weights.first), "0"), "these weights are nowhere on disk"

    with pytest.raises(EngineRefused, match="no safetensors files"):
        engine.remember_directory(tmp_path / "nowhere", 1)
    path, _ = write_version(tmp_path / "published", model, 1, weights.first)
    with pytest.raises(EngineRefused, match="version 2 is not served from a transfer"):
        engine.remember_directory(path, 2)
    assert note() == (str(weights.first), "0")
    engine.remember_directory(path, 1)
    assert note() == (str(path), "1")
    engine.stamp(1)
    assert note() == (str(path), "1")

    engine.start(weights.first)
    with pytest.raises(EngineRefused, match="version 1 is not served from a transfer"):
        engine.remember_directory(path, 1)


@pytest.mark.gpu
def test_nccl_carries_weights_from_one_gpu_to_another(
    inside: Callable[[str], ModuleType], weights: Any
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU on either side: two CUDA devices")
    new = {name: tensor.to("cuda:0") for name, tensor in weights.values(weights.moved()).items()}
    store, port = open_store("127.0.0.1", 60.0)
    announcement = announced(new, port=port, backend="nccl", bucket_bytes=1000)
    theirs = inside("bridle_wire").Announcement(**asdict(announcement))
    incoming = inside("bridle_transfer").Incoming(theirs, 1, torch.device("cuda:1"))
    broadcast(announcement, store, new.values(), incoming.tensors)
    assert weights.equal(dict(incoming.tensors()), {name: each.cpu() for name, each in new.items()})
