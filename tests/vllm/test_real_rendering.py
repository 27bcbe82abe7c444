"""Prompts as rendered here and by vLLM's own renderer, id for id.

The templates and tokenizers are genuine. vLLM renders in its own environment
(``render_prompts.py``).
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.vllm.installation import find_installation

families = pytest.importorskip("bridle.bench.families")
conversation = pytest.importorskip("bridle.bench.model_conversation")
models = pytest.importorskip("bridle.bench.models")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

MATERIAL = families.cache_directory()
"""The user's own cache, read before the tests hide it: what was fetched is kept between runs."""
SCRIPT = Path(__file__).with_name("render_prompts.py")
OWN_RENDERERS = {"deepseek-v3.2"}
"""Families that vLLM renders by code of its own, otherwise than the template does. The first prompt
of a session shows it, and calls are not continued exactly."""
BARE_TOOL = {"type": "function", "function": {"name": "ping"}, "cache_control": {"x": 1}}
"""A tool without description and parameters, and with a field that vLLM drops."""
STRICT_TOOL = {
    "function": {"strict": True, **conversation.TOOL, "parameters": {"type": "object"}},
    "type": "function",
}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(families.model_directory(name, MATERIAL))


def requests_of(name: str) -> list[dict[str, Any]]:
    """Return the family's conversation at each of its calls, and then variants of it.

    The variants have instructions, other tools, a reasoning effort, and content in parts.
    """
    family, tokenizer = families.FAMILIES[name], tokenizer_of(name)
    shown = models.look(tokenizer, family)
    played = models.played(tokenizer, family, shown)
    bodies = [{"messages": played.request(at)} for at in range(len(played.steps))]
    if played.tools:
        bodies = [{**body, "tools": played.tools} for body in bodies]
    (asked, *_), last = bodies, bodies[-1]
    system = {"role": "system", "content": conversation.SYSTEM}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    bodies += [
        {**asked, "messages": [system, *asked["messages"]]},
        {**last, "messages": [system, *last["messages"]]},
        {**asked, "tools": [BARE_TOOL]},
        {**asked, "tools": [STRICT_TOOL, *(played.tools or ())]},
        {**asked, "messages": [{"role": "user", "content": parts}]},
        {**asked, "reasoning_effort": "high"},
    ]
    return [{"model": "m", **body} for body in bodies]


@cache
def vllms() -> dict[str, Any]:
    """vLLM's prompt of every request of every family."""
    cases = {}
    for name, family in families.FAMILIES.items():
        cases[name] = {
            "directory": str(tokenizer_of(name).directory),
            "model_type": family.model_type,
            "requests": requests_of(name),
        }
    run = subprocess.run(
        [str(find_installation(None).python), str(SCRIPT)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout))


def rendered_here(tokenizer: Tokenizer, body: dict[str, Any]) -> str | TemplateError:
    arguments = {}
    if effort := body.get("reasoning_effort"):
        arguments = {"reasoning_effort": effort, "enable_thinking": True}
    try:
        return tokenizer.render(body["messages"], body.get("tools"), **arguments)
    except TemplateError as error:
        return error


@pytest.mark.parametrize("name", families.FAMILIES)
def test_prompts_are_those_of_vllms_renderer(name: str) -> None:
    tokenizer, rendered = tokenizer_of(name), 0
    for body, theirs in zip(requests_of(name), vllms()[name], strict=True):
        text = rendered_here(tokenizer, body)
        if isinstance(text, TemplateError):
            alone = name == "gpt-oss" and str(text) == "a content of several parts"
            assert alone or "refused" in theirs, (str(text), theirs)
            continue
        assert isinstance(theirs, list), theirs
        same = tokenizer.encode(text) == theirs
        assert same != (name in OWN_RENDERERS), (text, tokenizer.decode(theirs))
        rendered += 1
    assert rendered >= 8
