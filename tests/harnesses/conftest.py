"""A small stand-in for the proxy: the control routes, and a chat route that follows a script.

The tests marked ``harness`` run against the real proxy; these here hold the harness room's own
rules, among them those for a proxy that fails, which a real one does not do on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from bridle.harnesses.sandboxes import Launch, ProcessResult, SandboxProvider, SandboxRequest

Reply = Callable[[list[dict[str, Any]]], dict[str, Any] | web.Response]


@dataclass
class StandIn:
    """A stand-in for the proxy that keeps what it is told.

    Its ``reply`` answers a chat conversation with a message.
    """

    url: str = ""
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: list[dict[str, Any]] = field(default_factory=list)
    sealed: dict[str, str] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)
    """The reported start of each sealed session's harness."""
    chats: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    """Session, request body and Authorization header of every chat call."""
    failing: int = 0
    """The number of the next control requests that are answered with 503."""
    create_wait_s: float = 0.0
    """The seconds that a session exists before its creation is answered."""
    garbling: bool = False
    """True if who asks for a session is told something that is none."""
    seal_wait_s: float = 0.0
    """The seconds that a session is sealed before its seal is answered."""
    misencoding_seals: bool = False
    """True if the answer to a seal is in another encoding than it says."""
    losing_rewards: int = 0
    """The number of the next rewards that are answered with 503."""
    fault: str | None = None
    """The fault that is told of every session."""
    sampled: list[dict[str, Any]] = field(default_factory=list)
    """The tool calls of every session."""
    reply: Reply = lambda messages: {"role": "assistant", "content": "nothing"}
    counter: Iterator[int] = field(default_factory=itertools.count)

    async def create(self, request: web.Request) -> web.Response:
        self._fail_if_asked()
        body = await request.json()
        number = next(self.counter)
        identifier, key = f"ses_{number}", f"key-{number}"
        self.sessions[identifier] = body
        await asyncio.sleep(self.create_wait_s)
        if self.garbling:
            return web.Response(text="<html>", status=201)
        base = f"{self.url}/s/{identifier}"
        return web.json_response(
            {
                "id": identifier,
                "key": key,
                "verifier_key": f"brv_{identifier}",
                "base_urls": {"openai": f"{base}/v1", "anthropic": base, "google": base},
                "environment": {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key},
            },
            status=201,
        )

    async def reward(self, request: web.Request) -> web.Response:
        self._fail_if_asked()
        if self.losing_rewards > 0:
            self.losing_rewards -= 1
            raise web.HTTPServiceUnavailable
        given = {"session": request.match_info["id"], "key": request.headers.get("authorization")}
        self.rewards.append(given | await request.json())
        return web.json_response({}, status=201)

    async def seal(self, request: web.Request) -> web.Response:
        self._fail_if_asked()
        body = await request.json()
        self.sealed[request.match_info["id"]] = body["outcome"]
        self.started[request.match_info["id"]] = body.get("start")
        await asyncio.sleep(self.seal_wait_s)
        if self.misencoding_seals:
            return web.Response(body=b"plain", headers={"content-encoding": "gzip"})
        return web.json_response({})

    async def session(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self.sessions:
            raise web.HTTPNotFound
        return web.json_response({"calls": {}, "fault": self.fault})

    async def actions(self, request: web.Request) -> web.Response:
        return web.json_response(self.sampled)

    async def private_files(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": []})

    async def policy(self, request: web.Request) -> web.Response:
        return web.json_response({"version": 3})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        header = request.headers.get("authorization", "")
        self.chats.append((request.match_info["id"], body, header))
        message = self.reply(body["messages"])
        if isinstance(message, web.Response):
            return message
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        shape: dict[str, Any] = {"id": "c", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            return web.json_response(
                {**shape, "object": "chat.completion", "choices": [choice], "usage": usage}
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        calls = [{"index": i, **c} for i, c in enumerate(message.get("tool_calls", []))]
        delta = {**message, "tool_calls": calls} if calls else message
        for part, reason in ((delta, None), ({}, finish)):
            choice = {"index": 0, "delta": part, "finish_reason": reason}
            chunk = {**shape, "object": "chat.completion.chunk", "choices": [choice]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _fail_if_asked(self) -> None:
        if self.failing > 0:
            self.failing -= 1
            raise web.HTTPServiceUnavailable


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stand_in = StandIn()
    app = web.Application()
    app.router.add_post("/bridle/v1/sessions", stand_in.create)
    app.router.add_post("/bridle/v1/sessions/{id}/rewards", stand_in.reward)
    app.router.add_post("/bridle/v1/sessions/{id}/seal", stand_in.seal)
    app.router.add_get("/bridle/v1/sessions/{id}", stand_in.session)
    app.router.add_get("/bridle/v1/sessions/{id}/actions", stand_in.actions)
    app.router.add_get("/bridle/v1/private-files", stand_in.private_files)
    app.router.add_get("/bridle/v1/policy", stand_in.policy)
    app.router.add_post("/s/{id}/v1/chat/completions", stand_in.chat)
    runner = web.AppRunner(app)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    stand_in.url = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield stand_in
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def tool_call(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
        ],
    }


@dataclass(frozen=True)
class OneLaunch:
    """A launch, and the directory of the sandbox that is opened for it alone."""

    launch: Launch
    directory: Path

    @property
    def workspace(self) -> Path:
        return self.directory / "workspace"

    async def run(self, sandboxes: SandboxProvider) -> ProcessResult:
        async with sandboxes.open(SandboxRequest(self.directory)) as sandbox:
            return await sandbox.exec(self.launch)


@pytest.fixture
def make_launch(tmp_path: Path) -> Callable[..., OneLaunch]:
    """Launches in fresh directories."""
    numbers = itertools.count()

    def make(*argv: str, environment: Any = None, **fields: Any) -> OneLaunch:
        directory = tmp_path / "launches" / str(next(numbers))
        if environment is None:
            environment = {"PATH": os.environ["PATH"]}
        launch = Launch(argv, environment, **{"timeout_s": 30.0, **fields})
        return OneLaunch(launch, directory)

    return make


@pytest.fixture
def text_of() -> Callable[[Path], Awaitable[str]]:
    """The text of a file, once another process has written it."""

    def read(path: Path) -> str:
        return path.read_text() if path.exists() else ""

    async def wait(path: Path) -> str:
        for _ in range(1000):
            if (text := read(path)).strip():
                return text
            await asyncio.sleep(0.02)
        raise AssertionError(f"{path} was not written")

    return wait


def working_in(directory: Path) -> list[str]:
    """The processes whose working directory is ``directory`` or below it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").resolve(strict=True).is_relative_to(directory):
                found.append(entry.name)
    return found


@pytest.fixture
def assert_gone() -> Callable[[int | Path], Awaitable[None]]:
    """Return a function that waits until a process, or all that work in a directory, are gone.

    A process that is dead and merely not yet reaped counts as gone. A sandbox with process ids of
    its own has none that means something outside.
    """

    async def wait(what: int | Path) -> None:
        for _ in range(100):
            alive = is_alive(what) if isinstance(what, int) else working_in(what)
            if not alive:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{what} is still there")

    return wait


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@dataclass(frozen=True)
class Shop:
    """The example agent and its tasks."""

    script: Path
    module: ModuleType

    def tasks(self, split: str, count: int | None = None, seed: int = 0) -> list[Any]:
        found: list[Any] = self.module.tasks(split, count, seed)
        return found


@pytest.fixture(scope="session")
def shop() -> Shop:
    directory = Path(__file__).parents[2] / "examples/shop_agent"
    spec = importlib.util.spec_from_file_location("shop_tasks", directory / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return Shop(directory / "agent.py", module)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, shop: Shop) -> Path:
    """A directory with a tokenizer that knows the shop's words, a chat template and no weights."""
    from bridle.recipes.models.tiny_tokenizer import train_tokenizer

    directory = tmp_path_factory.mktemp("model")
    texts = [shop.script.read_text(), *(task.prompt for task in shop.tasks("train", 500))]
    train_tokenizer(directory, texts)
    return directory


@pytest.fixture
def shop_teacher() -> Callable[[list[Any]], Reply]:
    """Makes a reply function that answers every question of ``tasks`` in two tool calls."""

    def teacher(tasks: list[Any]) -> Reply:
        by_prompt = {task.prompt: task.payload for task in tasks}

        def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
            question = next(m["content"] for m in messages if m["role"] == "user")
            done = sum(m["role"] == "tool" for m in messages)
            payload = by_prompt[question]
            if done < len(payload["steps"]):
                step = payload["steps"][done]
                return tool_call(step["tool"], step["arguments"], len(messages))
            return {"role": "assistant", "content": str(payload["answer"])}

        return reply

    return teacher
