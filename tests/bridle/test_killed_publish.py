"""A trainer that is killed in mid-publish leaves an engine paused, and the next one goes on."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bridle.engine.contract.client import EngineClient, EngineError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.embedded import EmbeddedEngine
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.stack import Stack, StackError
from bridle.run.training import train
from bridle.run.training_plan import TrainingPlan
from bridle.store.reading.queries import Reader
from bridle.store.records import PolicyRecord, RunRecord
from bridle.store.writing.writer import Writer
from bridle.trainer.collection.background import StartGroup
from bridle.trainer.config import GrpoConfig

pytestmark = pytest.mark.loop

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from bridle.run.stack import Stack, StackError
from bridle.store.records import PolicyRecord
from bridle.trainer.policy.model import load_policy, vocabulary_size
from bridle.trainer.publish.publisher import Publisher, default_probes

engine_url, proxy_url, policy, published, where = sys.argv[1:]
stack = Stack(engine_url, proxy_url)
model = load_policy(Path(policy))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))

def announce(version):
    if where == "announced":
        stack.announce(version)
    os.kill(os.getpid(), signal.SIGKILL)

with stack.engine() as engine:
    Publisher(
        engine,
        Path(published),
        serving=PolicyRecord("run", 0, 0.0, path=policy),
        probes=default_probes(vocabulary_size(model)),
        announce=announce,
    ).publish(model, 1)
"""


def in_a_step(sessions: Callable[[int], Sequence[str]]) -> StartGroup:
    """Steps of one group each, whose sessions are there at once."""

    def start(
        number: int, begun: Callable[[], None], _ended: Callable[[str], None]
    ) -> Future[Sequence[str]]:
        begun()
        found: Future[Sequence[str]] = Future()
        found.set_result(sessions(number))
        return found

    return start


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    size = train_tokenizer(directory, ["a version that nobody has heard of"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=size, seed=3)
    return directory


@pytest.fixture
def stack(policy: Path, store: str) -> Iterator[Stack]:
    with EmbeddedEngine(policy) as engine:
        settings = ProxySettings(engine.base_url, store, tokenizer_dir=policy)
        with ProxyServer(settings) as proxy:
            yield Stack(engine.base_url, proxy.base_url)


@pytest.mark.parametrize(
    ("where", "before", "after", "ahead"),
    [("loaded", 0, 0, 0), ("loaded", 0, 0, 1), ("announced", 1, 2, 0)],
)
def test_the_next_trainer_replaces_what_nobody_knows_and_resumes_the_engine(
    stack: Stack,
    policy: Path,
    store: str,
    tmp_path: Path,
    where: str,
    before: int,
    after: int,
    ahead: int,
) -> None:
    """A number stands for one set of weights: one that the dead trainer told is not used again."""
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run", "train", time.time()))
    arguments = [
        stack.engine_url,
        stack.proxy_url,
        str(policy),
        str(tmp_path / "out" / "published"),
    ]
    with stack.engine() as engine:
        probe = list(range(5, 30))
        own = engine.score(probe)
        died = subprocess.run([sys.executable, "-c", KILLED, *arguments, where], check=False)
        assert died.returncode == -signal.SIGKILL
        assert (engine.is_paused(), stack.version()) == (True, before)

        plan = TrainingPlan(
            policy=policy,
            directory=tmp_path / "out",
            store=store,
            run_id="run",
            config=GrpoConfig(steps=1, max_staleness=ahead),
            groups_per_step=1,
        )
        train(plan, stack, in_a_step(lambda _step: []), on_step=lambda _report: None)
        assert (engine.is_paused(), stack.version()) == (False, after)
        assert engine.score(probe) == pytest.approx(own, abs=1e-6)
    with Reader(store) as reader:
        assert reader.policies("run")[-1].verified


@pytest.mark.parametrize("gone", ["engine", "proxy"])
def test_training_ahead_ends_when_the_engine_or_the_proxy_is_gone(
    policy: Path, store: str, tmp_path: Path, gone: str
) -> None:
    """Its sessions give nothing to train on, and it went on to its last step with such."""
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run", "train", time.time()))
    plan = TrainingPlan(
        policy=policy,
        directory=tmp_path / "out",
        store=store,
        run_id="run",
        config=GrpoConfig(steps=20, max_staleness=1),
        groups_per_step=1,
    )
    with ExitStack() as engines, ExitStack() as proxies:
        engine = engines.enter_context(EmbeddedEngine(policy))
        settings = ProxySettings(engine.base_url, store, tokenizer_dir=policy)
        services = Stack(engine.base_url, proxies.enter_context(ProxyServer(settings)).base_url)

        def sessions(step: int) -> list[str]:
            if step == 2:
                (engines if gone == "engine" else proxies).close()
            return []

        steps: list[int] = []
        with pytest.raises((EngineError, StackError)):
            train(
                plan,
                services,
                in_a_step(sessions),
                on_step=lambda report: steps.append(report.step),
            )
        assert max(steps) < 5


def test_training_ahead_publishes_again_to_an_engine_that_was_restarted(
    stack: Stack, policy: Path, store: str, tmp_path: Path
) -> None:
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run", "train", time.time()))
    other, size = tmp_path / "other", Tokenizer(policy).backend.get_vocab_size()
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(other, shape, vocab_size=size, seed=4)
    plan = TrainingPlan(
        policy=policy,
        directory=tmp_path / "out",
        store=store,
        run_id="run",
        config=GrpoConfig(steps=5, max_staleness=1),
        groups_per_step=1,
    )
    probe = list(range(5, 30))
    with stack.engine() as engine:
        own = engine.score(probe)

        def sessions(step: int) -> list[str]:
            if step == 2:
                engine.reload_weights(other)
                assert engine.score(probe) != pytest.approx(own, abs=1e-3)
            return []

        train(plan, stack, in_a_step(sessions), on_step=lambda _report: None)
        assert engine.score(probe) == pytest.approx(own, abs=1e-6)


class _HangingProxy(BaseHTTPRequestHandler):
    """Serves version 1, and does not answer the first that publishes another."""

    told = threading.Event()
    over = threading.Event()

    def do_GET(self) -> None:
        self._answer(b'{"version": 1}')

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if not self.told.is_set():
            self.told.set()
            self.over.wait(60)
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_trainer_told_to_end_in_mid_publish_leaves_the_engine_serving(
    policy: Path, store: str, tmp_path: Path
) -> None:
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _HangingProxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    proxy_url, tasks = f"http://127.0.0.1:{proxy.server_port}", tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t", "prompt": "Question?", "payload": {}}\n')
    with EmbeddedEngine(policy) as serving, EngineClient(serving.base_url) as engine:
        trainer = subprocess.Popen(
            [
                *(sys.executable, "-m", "bridle", "train", "--policy", str(policy)),
                *("--engine-url", serving.base_url, "--proxy-url", proxy_url),
                *("--agent", "echo {prompt}", "--tasks", str(tasks), "--verifier", "exact"),
                *("--set", f"services.store={store}", "--out", str(tmp_path / "out")),
            ],
        )
        try:
            assert _HangingProxy.told.wait(120)
            assert engine.is_paused()
            trainer.send_signal(signal.SIGTERM)
            trainer.wait(60)
            assert not engine.is_paused()
        finally:
            trainer.kill()
            trainer.wait()
            _HangingProxy.over.set()
            proxy.shutdown()
            proxy.server_close()


def test_a_version_that_engine_and_proxy_have_forgotten_is_not_used_again(
    stack: Stack, policy: Path, store: str, tmp_path: Path
) -> None:
    """`bridle train` starts both afresh: only the store knows what was published before."""
    with Writer(store) as writer:
        writer.add_sync(RunRecord("run", "train", time.time()))
        writer.add_sync(PolicyRecord("run", 1, time.time(), digest="other", verified=True))
    plan = TrainingPlan(
        policy=policy,
        directory=tmp_path / "out",
        store=store,
        run_id="run",
        config=GrpoConfig(steps=1),
        groups_per_step=1,
    )
    train(plan, stack, in_a_step(lambda _step: []), on_step=lambda _report: None)
    assert stack.version() == 2
    with Reader(store) as reader:
        versions = {policy.version: policy.digest for policy in reader.policies("run")}
    assert versions[1] == "other"
