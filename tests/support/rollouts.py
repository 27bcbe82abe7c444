"""A rollout of a small agent against a proxy in front of scripted engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from click.testing import Result

from bridle.engine.scripted import Script, ScriptedEngine
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import OtherModel, ProxySettings

ASK: Final = """
import json, os, sys, urllib.request, uuid

def ask(messages, headers={}, **more):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **more}).encode(),
        {
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            **headers,
        },
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def work(text, tool, seen, headers={}):
    \"\"\"Answer tool calls with ``seen`` until there are none; return the last reply.\"\"\"
    function = {"name": tool, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": text}]
    while True:
        reply = ask(messages, headers, tools=tools)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return reply["content"]
        for call in reply["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
"""
"""Python that an agent's program begins with: a request, and a loop over tool calls."""


@contextmanager
def scripted_proxy(
    model: Path, store: str, script: Script, others: Mapping[str, Script] | None = None
) -> Iterator[str]:
    """Yield the URL of a proxy whose policy is ``script``, with other models by name."""
    with ExitStack() as opened:

        def serve(name: str, play: Script) -> str:
            engine = ScriptedEngine(model, play, served_model_name=name)
            return opened.enter_context(engine).base_url

        proxy = ProxySettings(
            serve("policy", script),
            f"sqlite:///{store}",
            tokenizer_dir=model,
            other_models={
                name: OtherModel((serve(name, play),)) for name, play in (others or {}).items()
            },
        )
        yield opened.enter_context(ProxyServer(proxy)).base_url


@dataclass(frozen=True)
class ScriptedRollout:
    """``bridle rollout`` of an agent's program, in a folder with the files of a test."""

    bridle: Callable[..., Result]
    proxy: str
    folder: Path
    agent: str
    """The program, after :data:`ASK`."""
    own: str
    """The module ``own.py``, with verifiers and scorers."""
    task: Mapping[str, Any]
    tasks: str = ""
    """The name of a function of ``own.py`` that returns the tasks, in the place of ``task``."""

    def __call__(self, verifier: str, *more: object, scorers: tuple[str, ...] = ()) -> Result:
        """Run it with a verifier of ``own.py``. ``own:NAME`` names a scorer of ``own.py``."""
        (self.folder / "agent.py").write_text(ASK + self.agent)
        own = self.folder / "own.py"
        own.write_text(self.own)
        tasks = self.folder / "tasks.jsonl"
        tasks.write_text(json.dumps({"id": "t", **self.task}) + "\n")
        named = [one.replace("own:", f"{own}:") for one in scorers]
        return self.bridle(
            *("rollout", "--agent", f"{sys.executable} {self.folder / 'agent.py'} {{prompt}}"),
            *("--verifier", f"{own}:{verifier}", "--proxy", self.proxy),
            *("--tasks", f"{own}:{self.tasks}" if self.tasks else tasks),
            *("--set", f"agent.directory={self.folder / 'sessions'}"),
            *("--set", f"scorers.named={json.dumps(named)}"),
            *more,
        )
