"""Engines for the conformance suite: any base URL, else our own two on a policy made here.

``pytest tests/conformance --engine-url http://HOST:PORT`` runs the suite against an engine that
serves the directory made by ``make_policy.py`` (``BRIDLE_ENGINE_URL`` does the same). Nothing in
the tests knows more of an engine than its URL.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

MakeOnce = Callable[[str, Callable[[Path], object]], Path]
MAKER: Mapping[str, Any] = runpy.run_path(str(Path(__file__).with_name("make_policy.py")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine-url", help="run the conformance suite against this engine")


@dataclass
class Fold:
    """A choice of a streamed reply, put together from its chunks."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Api:
    """An engine's HTTP face, as a client sees it."""

    base_url: str
    model: str
    http: httpx.Client
    replies: Mapping[str, tuple[bool, tuple[str, ...]]]
    tools: list[dict[str, Any]]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def ask(self, asked: str, **extra: Any) -> dict[str, Any]:
        """The body that asks for one of the replies known by heart; greedy unless said."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0.0,
            "max_tokens": 120,
            "return_token_ids": True,
            "logprobs": True,
        }
        if self.replies[asked][0]:
            body["tools"] = self.tools
        return {key: value for key, value in (body | extra).items() if value is not None}

    def chat(self, asked: str, **extra: Any) -> dict[str, Any]:
        reply = self.post("/v1/chat/completions", **self.ask(asked, **extra))
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def stream(self, asked: str, **extra: Any) -> list[dict[str, Any]]:
        return self.events("/v1/chat/completions", **self.ask(asked, stream=True, **extra))

    def fine_stream(self, asked: str, **extra: Any) -> list[dict[str, Any]]:
        """Return a stream with hardly more than one token in a chunk.

        An engine may send what its client was too slow to take as one chunk, so a busy machine may
        need several tries.
        """
        finest: list[dict[str, Any]] = []
        for _ in range(8):
            chunks = self.stream(asked, **extra)
            finest = max(finest, chunks, key=len)
            if len(finest) > 0.9 * len(self.fold(finest).token_ids):
                break
        return finest

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The parsed events of a stream, which must end in ``[DONE]``."""
        events = []
        with self.http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def tokenize(self, prompt: str) -> list[int]:
        return list(self.post("/tokenize", model=self.model, prompt=prompt).json()["tokens"])

    def error(self, path: str, **body: Any) -> dict[str, Any]:
        """The error object of a refused request, whose code is the HTTP status."""
        reply = self.post(path, **body)
        error = dict(reply.json()["error"])
        assert error["code"] == reply.status_code >= 400, reply.text
        assert {"message", "type", "param", "code"} <= error.keys()
        return error

    @staticmethod
    def fold(chunks: list[dict[str, Any]], index: int = 0) -> Fold:
        fold = Fold()
        for chunk in chunks:
            for choice in chunk["choices"]:
                if choice["index"] != index:
                    continue
                delta = choice["delta"]
                fold.content += delta.get("content") or ""
                fold.reasoning += delta.get("reasoning") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(fold.calls):
                        fold.calls.append({"id": call["id"], "name": "", "arguments": ""})
                    known, piece = fold.calls[call["index"]], call["function"]
                    known["name"] += piece.get("name") or ""
                    known["arguments"] += piece.get("arguments") or ""
                fold.token_ids += choice.get("token_ids") or ()
                for entry in (choice.get("logprobs") or {}).get("content") or ():
                    fold.logprobs.append(entry["logprob"])
                if choice.get("finish_reason"):
                    fold.finish_reason = choice["finish_reason"]
                    fold.stop_reason = choice.get("stop_reason")
        return fold


def _engine_url(config: pytest.Config) -> str | None:
    return config.getoption("--engine-url", default=None) or os.environ.get("BRIDLE_ENGINE_URL")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test runs against the engine that was named, else against both of ours.

    Tests marked ``policy`` need an engine that samples; those marked ``ours`` hold where vLLM is
    known to do otherwise (docs/engine-contract.md).
    """
    if "engine_kind" not in metafunc.fixturenames:
        return
    if _engine_url(metafunc.config):
        kinds = [] if metafunc.definition.get_closest_marker("ours") else ["named"]
    elif metafunc.definition.get_closest_marker("policy"):
        kinds = ["embedded"]
    else:
        kinds = ["embedded", "scripted"]
    metafunc.parametrize("engine_kind", kinds, scope="session")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "policy: needs an engine that samples from a policy")
    config.addinivalue_line("markers", "ours: vLLM is known to do otherwise, see the docs")


@pytest.fixture(scope="session")
def policy_dir(make_once: MakeOnce) -> Path:
    return make_once("conformance-policy", MAKER["make"])


@pytest.fixture(scope="session")
def base_url(engine_kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    if engine_kind == "named":
        url = _engine_url(request.config)
        assert url is not None
        yield url.rstrip("/")
        return
    directory = request.getfixturevalue("policy_dir")
    if engine_kind == "embedded":
        from bridle.engine.embedded import EmbeddedEngine

        with EmbeddedEngine(directory) as embedded:
            yield embedded.base_url
    else:
        from bridle.engine.scripted import ScriptedEngine, ScriptedRequest

        def script(asked: ScriptedRequest) -> str:
            question = asked.messages[-1]["content"] if asked.messages else "text"
            if isinstance(question, list):
                question = "".join(part["text"] for part in question)
            replies: tuple[str, ...] = MAKER["REPLIES"][question][1]
            return replies[0]

        with ScriptedEngine(
            directory, script, max_model_len=MAKER["CONTEXT"], parse_thinking=False
        ) as scripted:
            yield scripted.base_url


@pytest.fixture
def api(base_url: str) -> Iterator[Api]:
    with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as http:
        card = http.get("/v1/models").json()["data"][0]
        yield Api(base_url, card["id"], http, MAKER["REPLIES"], MAKER["TOOLS"])
