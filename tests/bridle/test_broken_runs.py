"""Runs that are broken by really breaking them: the doctor names the cause first.

Agents are processes, the proxy and its engine serve HTTP, and each run is recorded by the command
that a user types. ``tests/viewer/test_findings.py`` has the same causes in stores that are written
directly.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.engine.serve.transport import ServerThread
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.records import Continuation

pytestmark = pytest.mark.loop

AGENT = """
import json, os, sys, urllib.error, urllib.request

BASE = {base}
messages = [{{"role": "user", "content": sys.argv[1]}}]
for question in ("Are you sure?", ""):
    body = {{"model": "policy", "messages": messages, **{fields}}}
    request = urllib.request.Request(
        BASE + "/chat/completions", json.dumps(body).encode(),
        {{"content-type": "application/json",
          "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
    )
    try:
        reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.URLError as error:
        print("no answer:", error)
        break
    messages += [reply, {{"role": "user", "content": question}}]
    answer = reply["content"]
else:
    print(answer)
"""
"""Two turns; its answer is the second."""
SESSIONS_BASE = 'os.environ["OPENAI_BASE_URL"]'
NOT_THE_SESSIONS = '"http://127.0.0.1:9/v1"'
MIXED = "float(delivery.answer == 'yes')"
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" and not loop.last %}(earlier) {% endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""Writes a reply otherwise once it is history."""

Bridle = Callable[..., Result]


class Mind:
    """Answers the second question of a task's sessions with yes and no in turn."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        task = str(request.messages[0]["content"])
        if len(request.messages) == 1:
            return ScriptedReply("I think so.")
        self.asked[task] += 1
        return ScriptedReply("yes" if self.asked[task] % 2 else "no")


@dataclass
class Plan:
    """A rollout of four tasks in groups of four; healthy but for what a test changes."""

    base: str = SESSIONS_BASE
    """The base URL of the agent's calls, as Python."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The further fields of the agent's requests."""
    reward: str = MIXED
    """The verifier's return value, as Python."""
    options: tuple[object, ...] = ()
    """More of ``bridle rollout``."""
    router: bool = False
    """True if a router without token ids stands before the engine."""
    engine_path: str = ""
    """The path that the proxy adds to the engine's address."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The further settings of the proxy."""


def equal_rewards(plan: Plan) -> None:
    plan.reward = "0.0"


def ids_stripped_by_a_router(plan: Plan) -> None:
    plan.router = True


def wrong_base_url(plan: Plan) -> None:
    plan.base = NOT_THE_SESSIONS


def wrong_engine_url(plan: Plan) -> None:
    plan.engine_path = "/openai"


def template_that_rewrites_history(plan: Plan) -> None:
    plan.settings = {"continuation": Continuation.RENDERED}


def dead_verifier(plan: Plan) -> None:
    plan.reward = "open('/nothing/here')"


def sampler_at_temperature_zero(plan: Plan) -> None:
    plan.fields = {"temperature": 0}
    plan.options = ("--set", "agent.sampling=agent")


def everything_truncated(plan: Plan) -> None:
    plan.fields = {"max_tokens": 1}


def no_group(plan: Plan) -> None:
    plan.options = ("--group-size", 1)


CAUSES: dict[str, Callable[[Plan], None]] = {
    "rewards_equal": equal_rewards,
    "no_token_ids": ids_stripped_by_a_router,
    "no_calls": wrong_base_url,
    "calls_failed": wrong_engine_url,
    "template_rewrites_history": template_that_rewrites_history,
    "no_reward": dead_verifier,
    "temperature_zero": sampler_at_temperature_zero,
    "truncated": everything_truncated,
    "no_groups": no_group,
}


@pytest.fixture
def rewriting(model_dir: Path, tmp_path: Path) -> Path:
    """The model's directory with a template that rewrites earlier replies."""
    directory = tmp_path / "rewriting"
    directory.mkdir()
    for file in model_dir.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def router(engine: str) -> Starlette:
    """Sends requests on without ``return_token_ids``, as routers do that know their fields."""

    async def forward(request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        for name in [name for name in body if "token_ids" in name or name == "logprobs"]:
            del body[name]
        async with httpx.AsyncClient(base_url=engine, timeout=60) as client:
            known = {"content-type": "application/json"}
            sent = None if request.method == "GET" else json.dumps(body).encode()
            reply = await client.request(
                request.method, request.url.path, content=sent, headers=known
            )
        return Response(reply.content, reply.status_code, media_type=reply.headers["content-type"])

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


@pytest.fixture
def recorded(
    bridle: Bridle, store: str, rewriting: Path, tmp_path: Path
) -> Iterator[Callable[[Plan], str]]:
    """Runs a plan; returns the run."""
    with ExitStack() as running:

        def record(plan: Plan) -> str:
            engine = running.enter_context(
                ScriptedEngine(rewriting, Mind(), served_model_name="policy")
            )
            url = engine.base_url
            if plan.router:
                url = running.enter_context(ServerThread(router(url))).base_url
            settings = {"tokenizer_dir": rewriting} | plan.settings
            proxy = running.enter_context(
                ProxyServer(
                    ProxySettings(f"{url}{plan.engine_path}", f"sqlite:///{store}", **settings)
                )
            )
            return rollout(bridle, proxy.base_url, plan, tmp_path)

        yield record


def rollout(bridle: Bridle, proxy: str, plan: Plan, folder: Path) -> str:
    """``bridle rollout`` as the plan has it; returns the run."""
    (folder / "agent.py").write_text(AGENT.format(base=plan.base, fields=plan.fields))
    own = folder / "own.py"
    own.write_text(f"def check(delivery):\n    return {plan.reward}\n")
    tasks = folder / "tasks.jsonl"
    lines = [{"id": f"t{n}", "prompt": f"Is {n} even?"} for n in range(4)]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = bridle(
        *(
            "rollout",
            "--proxy",
            proxy,
            "--tasks",
            tasks,
            "--set",
            f"agent.directory={folder / 'sessions'}",
        ),
        *("--agent", f"{sys.executable} {folder / 'agent.py'} {{prompt}}"),
        *("--verifier", f"{own}:check", "--group-size", 4, *plan.options),
    )
    found = re.search(r"bridle doctor (run_\w+)", done.stderr)
    assert found is not None, done.output
    return found[1]


def diagnosis(bridle: Bridle, store: str, run: str) -> list[dict[str, Any]]:
    done = bridle("doctor", run, "--store", store, "--json")
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    assert done.exit_code == any(each["severity"] == "error" for each in findings)
    return findings


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.sampled(2)
def test_the_doctor_names_first_what_broke_a_rollout(
    cause: str, recorded: Callable[[Plan], str], bridle: Bridle, store: str
) -> None:
    plan = Plan()
    CAUSES[cause](plan)
    findings = diagnosis(bridle, store, recorded(plan))
    assert [each["name"] for each in findings][:1] == [cause]
    assert findings[0]["evidence"]
    assert findings[0]["remedy"]


def test_a_rollout_that_nothing_broke_has_no_finding(
    recorded: Callable[[Plan], str], bridle: Bridle, store: str
) -> None:
    assert diagnosis(bridle, store, recorded(Plan())) == []


def policy_dir(folder: Path, seed: int) -> Path:
    """A tiny policy with weights of its own."""
    policy = folder / f"policy-{seed}"
    size = train_tokenizer(policy, ["Is 2 even? Are you sure? 0123456789"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(policy, shape, vocab_size=size, seed=seed)
    return policy


def drawn_from(bridle: Bridle, store: str, policy: Path, reward: str, folder: Path) -> None:
    """A rollout whose tokens an engine drew from ``policy``."""
    plan = Plan(reward=reward, fields={"max_tokens": 4})
    with (
        EmbeddedEngine(policy) as engine,
        ProxyServer(
            ProxySettings(engine.base_url, f"sqlite:///{store}", tokenizer_dir=policy)
        ) as proxy,
    ):
        rollout(bridle, proxy.base_url, plan, folder)


VARIED = "float(sum(map(ord, delivery.answer)) % 2)"
TRAINED: dict[str, tuple[int, str, tuple[object, ...]]] = {
    "stale_tokens": (
        3,
        VARIED,
        ("--set", "recordings.version=5", "--set", "training.max_staleness=1"),
    ),
    "engine_weights_differ": (4, VARIED, ("--set", "recordings.other_policy=true")),
    "rewards_equal": (3, "1.0", ()),
}
"""The seed of the trained weights, the reward and the options, by cause.

Seed 3 drew the sessions.
"""


@pytest.mark.parametrize("cause", TRAINED)
@pytest.mark.sampled(3)
def test_the_doctor_names_first_what_broke_a_training_run(
    cause: str, bridle: Bridle, store: str, tmp_path: Path
) -> None:
    seed, reward, options = TRAINED[cause]
    drawn_from(bridle, store, policy_dir(tmp_path, 3), reward, tmp_path)
    done = bridle(
        *("train", "--from-store", store, "--policy", policy_dir(tmp_path, seed)),
        *(
            "--set",
            "groups.per_step=4",
            "--set",
            "groups.size=4",
            "--out",
            tmp_path / "out",
            *options,
        ),
    )
    assert done.exit_code == 0, done.output
    findings = diagnosis(bridle, store, "train:out")
    assert [each["name"] for each in findings][:1] == [cause]
