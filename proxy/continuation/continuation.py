"""Exact continuation: the engine is sent what it saw and sampled, plus only what is new.

``prompt = ids of the base's prompt + its sampled ids + missing end-of-turn + rendered tail``. The
history is neither rendered nor tokenised again, whatever the harness echoes back, so a conversation
that is one line stays one line in tokens. A request whose lineage broke below an intact base still
keeps the base's ids; without a base, or where the template cannot be proven to render tails on
their own (``proxy/continuation/probe.py``), the engine renders the messages and the prompt says
why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from bridle.engine.contract.tokenizer import TemplateError, Tokenizer
from bridle.proxy.continuation.probe import Prober
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.continuation.report import TemplateReport
from bridle.proxy.continuation.tail import MARKER, SeamError, Setting, Tail, TailRenderer
from bridle.proxy.lineage.turn import Link
from bridle.proxy.wire.canonical import Request
from bridle.store.records import BreakReason, TokenIds
from bridle.store.tree import path_ids

__all__ = ["Continuer", "TemplateReport"]

_OF_THE_RENDERER: Final = frozenset(
    {"add_generation_prompt", "documents", "messages", "self", "tools"}
)
"""Template arguments that whoever renders sets: what a client's mean is for the engine to say."""


class Continuer:
    """Makes prompts for one model's template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tails = TailRenderer(tokenizer)
        self._prober = Prober(tokenizer, self._tails)
        self.report: TemplateReport = self._prober.report()
        self._stops = tokenizer.eos_token_ids | self.report.end_of_turn_ids

    def prompt(self, link: Link, request: Request) -> CallPrompt:
        """The prompt of a request that belongs where ``link`` says."""
        if isinstance(request.prompt, tuple):
            return CallPrompt(np.asarray(request.prompt, dtype=np.uint32), link.break_reason)
        base = link.base
        if base is None:
            return CallPrompt(None, link.break_reason)
        tip = base.tip(link.choice)
        if tip is None:
            return CallPrompt(None, link.break_reason or BreakReason.PARENT_WITHOUT_IDS)
        tail = self._tail(link, request)
        if tail is None:
            return CallPrompt(None, link.break_reason or BreakReason.TAIL_NOT_LOCAL)
        if self._other_beginning(base.seen.arguments, link, request):
            return CallPrompt(None, link.break_reason or BreakReason.TEMPLATE_REWROTE_HISTORY)
        new = self._new_ids(int(tip.token_ids[-1]), tail)
        return CallPrompt(path_ids(tip, tip.end, new), link.break_reason, len(new))

    def _other_beginning(self, before: str | None, link: Link, request: Request) -> bool:
        """Whether the template, which was given the arguments ``before``, says something else
        before the first user turn with those of ``request``: a reasoning effort, for one."""
        now = link.seen.arguments
        if before == now:
            return False
        head = [message.to_chat() for message in request.messages[: _leading(request)]]
        try:
            one, other = (
                self.tokenizer.render(
                    [*head, {"role": "user", "content": MARKER}],
                    request.tools,
                    add_generation_prompt=False,
                    **json.loads(arguments or "{}"),
                ).rpartition(MARKER)[0]
                for arguments in (before, now)
            )
        except (TemplateError, TypeError):
            return True
        return one != other

    def _tail(self, link: Link, request: Request) -> Tail | None:
        """The rendered tail, or ``None`` when it cannot be rendered on its own."""
        if link.base is None or request.extra.get("continue_final_message"):
            return None
        if not _OF_THE_RENDERER.isdisjoint(request.template_kwargs or ()):
            return None
        if not all(
            [type(m.content) is not list or _only_text(m.content) for m in request.messages]
        ):
            return None
        head = request.messages[: _leading(request)]
        setting = Setting(head, request.tools, request.template_arguments)
        reply = link.base.choices[link.choice].message
        if not self._prober.proven(reply, link.tail, setting):
            return None
        try:
            return self._tails.tail(reply, link.tail, setting)
        except (TemplateError, SeamError):
            return None

    def _new_ids(self, last: int, tail: Tail) -> TokenIds:
        """What to append after a path that ends in the token ``last``."""
        if last in self._stops:
            # Where the next turn's first token is what ends a reply, it has been sampled already.
            sampled_already = len(tail.token_ids) > 0 and int(tail.token_ids[0]) == last
            return tail.token_ids[1:] if sampled_already else tail.token_ids
        if tail.end_id is None:
            return tail.token_ids
        return np.concatenate([np.asarray([tail.end_id], dtype=np.uint32), tail.token_ids])


def _leading(request: Request) -> int:
    count = 0
    while count < len(request.messages) and request.messages[count].role == "system":
        count += 1
    return count


def _only_text(parts: Sequence[Mapping[str, Any]]) -> bool:
    return all(part.get("type") == "text" for part in parts)
