"""Exact continuation: the engine is sent the ids that it saw and sampled, plus only the new ones.

``prompt = ids of the base's prompt + its sampled ids + missing end-of-turn + rendered tail``. The
history is not tokenised again, and is rendered again only where the tail depends on it. So a
conversation that is one line stays one line in tokens, whatever the harness echoes back. A request
whose lineage broke below an intact base still keeps the base's ids. Without a base, or if the
template does not render the tail apart from what stands before it, the engine renders the messages,
and the prompt has the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np
from msgspec import structs

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.continuation.probe import Prober
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.continuation.report import TemplateReport
from bridle.proxy.continuation.roles import as_reply
from bridle.proxy.continuation.tail import MARKER, SeamError, Setting, Tail, TailRenderer
from bridle.proxy.session.turn import Link
from bridle.proxy.wire.canonical import Message, Request
from bridle.proxy.wire.cut_ids import KnownPrompt
from bridle.store.records import BreakReason, TokenIds
from bridle.store.tree import path_ids

__all__ = ["Continuer", "TemplateReport"]

_OF_THE_RENDERER: Final = frozenset(
    {"add_generation_prompt", "documents", "messages", "self", "tools"}
)
"""Template arguments that the renderer sets; the engine decides what a client's values mean."""

_LONG_TAIL: Final = 16_384
"""Characters of a tail that takes longer to tokenise than a thread takes to wake up."""
_BEFORE_END: Final = 8
"""Number of a tail's first ids among which a repeated end of the reply is looked for."""
_TAILS_KEPT: Final = 128
_LONGEST_KEY: Final = 65_536
"""Bytes of a request's setting and tail at which the tail is no longer remembered."""
_READ: Final = 200
"""Characters at the end of a message that are looked for in its prompt."""
_LATEST: Final = 8
"""Number of messages of the user and the tools that are looked at."""
_WORD: Final = re.compile(r"[A-Za-z]{4,}")
_ENCODER: Final = msgspec.msgpack.Encoder()


class Continuer:
    """A maker of prompts for one model's template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tails = TailRenderer(tokenizer)
        self._prober = Prober(tokenizer, self._tails)
        self.report: TemplateReport = self._prober.report()
        self.roles = self.report.roles
        self._latest: dict[bytes, tuple[Tail | None]] = {}
        self._stops = tokenizer.eos_token_ids | self.report.end_of_turn_ids

    def reads(self, prompt: TokenIds, messages: Sequence[Message]) -> bool:
        """Return whether the text of a prompt's ids has the words that end the latest messages.

        Ids of another tokenizer have another text. One word in ten may be written otherwise by the
        template. Messages of the system are left out, which a template may move or drop.
        """
        texts = [one.content for one in messages if one.role in ("user", "tool")]
        words = [
            word
            for text in texts[-_LATEST:]
            if isinstance(text, str)
            for word in _WORD.findall(text[-_READ:])
        ]
        text = self.tokenizer.decode(prompt.tolist())
        return sum(word in text for word in words) >= 0.9 * len(words)

    def takes_long(self, link: Link) -> bool:
        """Return whether the tail takes longer to tokenise than other streams should wait.

        The other streams are those of other clients.
        """
        length = 0
        for message in () if link.base is None else link.tail:
            content = message.content
            if isinstance(content, list):
                length += sum(len(part["text"]) for part in content if part.get("type") == "text")
            else:
                length += len(content or "")
        return length >= _LONG_TAIL

    def prompt(self, link: Link, request: Request, known: KnownPrompt | None = None) -> CallPrompt:
        """Return the prompt of a request that has this ``link``.

        ``known`` is the session's latest long prompt, from which the ids may go on.
        """
        if isinstance(request.prompt, tuple):
            return CallPrompt(np.asarray(request.prompt, dtype=np.uint32), link.break_reason)
        base = link.base
        if base is None:
            return CallPrompt(None, link.break_reason)
        tip = base.tip(link.choice)
        if tip is None:
            return CallPrompt(None, link.break_reason or BreakReason.PARENT_WITHOUT_IDS)
        reply = base.choices[link.choice].message
        if reply.tool_calls:
            reply = as_reply(self.roles, _as_sampled(reply))
        tail = self._tail(reply, link, request)
        if tail is None:
            return CallPrompt(None, link.break_reason or BreakReason.TAIL_NOT_LOCAL)
        before = base.seen.arguments
        if before != link.seen.arguments and self._other_beginning(before, link, request):
            return CallPrompt(None, link.break_reason or BreakReason.TEMPLATE_REWROTE_HISTORY)
        new = self._new(tail, int(tip.token_ids[-1]))
        # A replayed reply is the end of a span that begins within the prompt.
        reply_ids = tip.token_ids[max(0, base.prompt_length - tip.start) :]
        more = np.concatenate([reply_ids, new])
        followed = None if known is None else known.followed(base.prompt, more)
        ids, text = followed or (path_ids(tip, tip.end, new), None)
        return CallPrompt(ids, link.break_reason, text, len(new))

    def _new(self, tail: Tail, last: int) -> TokenIds:
        """Return the ids of ``tail`` that come after a reply whose last token is ``last``."""
        if last in self._stops:
            return tail.token_ids[self._sampled_already(tail.token_ids, last) :]
        if tail.end_id is None:
            return tail.token_ids
        return np.concatenate([np.asarray([tail.end_id], dtype=np.uint32), tail.token_ids])

    def _sampled_already(self, new: TokenIds, last: int) -> int:
        """Return the number of new ids that repeat the reply's last token.

        In some templates, the next turn's first token ends a reply; white space may stand before
        it.
        """
        (found,) = np.nonzero(new[:_BEFORE_END] == last)
        if not len(found):
            return 0
        at = int(found[0])
        return at + 1 if not self.tokenizer.decode(new[:at].tolist()).strip() else 0

    def _tail(self, reply: Message, link: Link, request: Request) -> Tail | None:
        """Return the tail that the request renders after ``reply``.

        Return ``None`` if the tail cannot be rendered apart from the text before it.
        """
        setting = _setting(link, request)
        if setting is None:
            return None
        tail = self._local_tail(reply, link, request, setting)
        if tail is not None:
            return tail
        before = _before(link, request)
        if before is None:
            return None
        try:
            return self._tails.tail_of_whole(before, reply, link.tail, setting)
        except (TemplateError, SeamError):
            return None

    def _local_tail(
        self, reply: Message, link: Link, request: Request, setting: Setting
    ) -> Tail | None:
        """Return the tail, rendered without the history, or ``None`` if it depends on that.

        The latest tails are remembered, for calls that ask the same again.
        """
        asked = (reply.content, reply.tool_calls, setting.head, link.tail, request.tools)
        key = _ENCODER.encode((asked, link.seen.arguments, request.template_kwargs, request.extra))
        known = self._latest.get(key)
        if known is not None:
            return known[0]
        shape = self._prober.proven(reply, link.tail, setting)
        tail = None
        if shape is not None:
            with suppress(TemplateError, SeamError):
                tail = self._tails.tail(reply, link.tail, setting, shape)
        if len(key) < _LONGEST_KEY:
            if len(self._latest) >= _TAILS_KEPT:
                self._latest.clear()
            self._latest[key] = (tail,)
        return tail

    def _other_beginning(self, before: str | None, link: Link, request: Request) -> bool:
        """Return True if the arguments of ``request`` make the template write another beginning.

        The beginning is the text before the first user turn. It is compared with the one that the
        arguments ``before`` made the template write: another reasoning effort changes it, for
        example.
        """
        now = link.seen.arguments
        head = [message.to_chat() for message in request.messages[: link.head]]
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


def _setting(link: Link, request: Request) -> Setting | None:
    """Return what stands around the turns of a request, or ``None`` if only the engine knows."""
    if not link.text_only:
        return None
    extra = request.extra
    if extra.get("continue_final_message") or extra.get("add_generation_prompt") is False:
        return None
    if not _OF_THE_RENDERER.isdisjoint(request.template_kwargs or ()):
        return None
    return Setting(request.messages[: link.head], request.tools, request.template_arguments)


def _before(link: Link, request: Request) -> tuple[Message, ...] | None:
    """Return the messages before the base's reply.

    Return ``None`` if the reply does not stand directly before the tail, because the messages have
    been changed for the template.
    """
    at = len(request.messages) - len(link.tail) - 1
    if at < 0 or request.messages[at].role != "assistant":
        return None
    roles = [message.role for message in request.messages[at + 1 :]]
    return request.messages[:at] if roles == [one.role for one in link.tail] else None


def _as_sampled(reply: Message) -> Message:
    """Return the reply with the engine's own ids of its calls."""
    calls = [
        structs.replace(call, id=call.engine_id or call.id, engine_id=None)
        for call in reply.tool_calls
    ]
    return structs.replace(reply, tool_calls=tuple(calls))
