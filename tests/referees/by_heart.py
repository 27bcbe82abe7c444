"""A policy that knows by heart what a scripted engine was asked and replied.

An engine that really samples, such as vLLM, then serves replies to the same questions, so that a
judge of their form has thinking and calls to judge, and none of them is cut at its limit.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bridle.engine.scripted import ScriptedReply, ScriptedRequest

CONFORMANCE = runpy.run_path(str(Path(__file__).parents[1] / "conformance" / "make_policy.py"))
CONTEXT = 8192
"""Room for the longest reply that a judge asks for, 4,096 tokens, after its prompt."""


def reply_text(reply: ScriptedReply) -> str:
    """Return the text that the policy samples for this reply.

    Judges require the calls that they ask for. vLLM's grammar then leaves no room for a thought.
    """
    return (replace(reply, reasoning=None) if reply.tool_calls else reply).markup()


def learn(
    directory: Path,
    requests: Sequence[ScriptedRequest],
    script: Callable[[ScriptedRequest], ScriptedReply],
) -> None:
    """Write the policy that answers ``requests`` as ``script`` does, beside its tokenizer."""
    replies = {
        tuple(one.prompt_ids): one.tokenizer.encode(reply_text(script(one)) + "<|im_end|>")
        for one in requests
    }
    examples = [CONFORMANCE["Example"](*pair) for pair in replies.items()]
    CONFORMANCE["learn"](directory, examples, CONTEXT)
