"""The form in which a request reaches the engines of a pool, and the check of their template.

The engine's own tool-call ids stand for the minted ones, and the messages have an order of roles
that the model's template takes. The policies' rules about roles come from the local tokenizer. If a
model's template is not at hand, its engine is asked: its ``/tokenize`` renders the questions of
:mod:`bridle.proxy.continuation.roles`, once for each pool, before the first request that some
template might refuse. The record keeps what the client sent.

The check makes sure that an engine turns a conversation into the same token ids as the local
tokenizer. Exact continuation appends new ids to those of the engine. If they were made by another
model's tokenizer or template, or for an engine that does not use the template (vLLM renders gpt-oss
by its own code), they would be nonsense that nothing else notices: the engine takes any ids.

Before the commit of a call that continues no other, the prompt that its engine reports is compared
with the local rendering of the same request, in a thread. This is done once for each shape of a
prompt (with and without tools, with and without template arguments, which templates render by
parts of their own), and again when the engine may have got another template: after a publish, and
in a new connection epoch. A difference is noted on the call, and calls of that engine are rendered
in full from then on. If no prompt of the engine could be compared (another process began the
session), a session is continued if the engine's own tokenisation of a probe agrees.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from bridle.engine.contract.contract import CHAT_COMPLETIONS
from bridle.engine.contract.errors import TemplateError
from bridle.proxy.continuation.bare_tools import with_parameters
from bridle.proxy.continuation.efforts import with_taken_effort
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.continuation.roles import (
    QUESTIONS,
    TAKES_ALL,
    TOOLS,
    TOOLS_NOT_SHOWN,
    Question,
    RoleRules,
    is_ordinary,
    rules_from,
    unserved,
)
from bridle.proxy.engines.engine import PooledEngine
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.session.engine_ids import with_engine_ids, written_messages
from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import Link
from bridle.proxy.session.upstream_fields import with_upstream_fields
from bridle.proxy.wire.canonical import ApiError, Message, Reply, Request, plain_ids
from bridle.store.records import (
    RENDERS_OTHERWISE,
    BreakReason,
    Continuation,
    Note,
    TokenIds,
    token_array,
)
from bridle.store.tree import common_prefix

if TYPE_CHECKING:
    from bridle.engine.contract.tokenizer import Tokenizer
    from bridle.proxy.continuation.continuation import Continuer

log = logging.getLogger("bridle.proxy")

PROBE: Final[tuple[dict[str, Any], ...]] = (
    {"role": "user", "content": "Is naïve 3 × 4 = 12, or “twelve”?\n\tdef f(x): return {x: [1.5]}"},
)
"""A message of letters, digits, signs and white space, which no two tokenizers split alike."""

TOKENIZER_DIFFERS: Final = "tokenizer_differs"
UNCOMPARED: Final = "rendering_uncompared"

_AT_ONCE: Final = 8
"""Number of questions that are rendered at once."""
_PLAIN: Final = Question((Message("user", "Ready?"),))
_AGAIN_S: Final = 30.0
"""Seconds until an engine that disagreed about the probe is asked again, because it may have been
restarted."""
_SHOWN: Final = 12
"""Number of ids on each side whose text a note shows."""
_RENDERING: Final = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "documents"}
)
"""Request fields that make the engine render in another way than is done here."""


class EngineForm(NamedTuple):
    """A request in the form that the engine gets."""

    request: Request
    prompt: CallPrompt
    """The prompt of an exact continuation, or the reason why there is none."""
    notes: tuple[Note, ...]
    rules: RoleRules | None
    """The rules about roles of the model's template, if they are known."""
    pool: EnginePool
    refusal: ApiError | None = None
    """The error for a request that the model's template cannot serve."""
    written: tuple[bytes, ...] | None = None
    """The pieces of a JSON array of the request's messages, if they have been written already."""


class PoolTemplate:
    """The template of the model that a pool of engines serves."""

    def __init__(self, pool: EnginePool, continuer: Continuer | None) -> None:
        """Create it for ``pool``.

        ``continuer`` has the policies' template; it is ``None`` if that is not at hand.
        """
        self.check: RenderingCheck | None = None
        """The check of the engines' prompts; ``None`` if they cannot be rendered here."""
        self._pool = pool
        self._continuer = continuer if pool.trained else None
        self._rules: RoleRules | None = None
        self._known = pool.external
        """True if ``_rules`` is as good as it gets."""
        self._asking = asyncio.Lock()
        if pool.external:
            self._rules = RoleRules()
        if self._continuer is not None:
            self._rules, self._known = self._continuer.roles, True
            if self._continuer.report.usable:
                self.check = RenderingCheck(self._continuer.tokenizer)

    async def form(
        self, session: Session, link: Link, request: Request, recorded: TokenIds | None = None
    ) -> EngineForm:
        """Return the form in which ``request`` reaches the engines.

        ``link`` is the request's link to the call of ``session`` that it continues. ``recorded``
        are the ids of the same prompt in another session's record, ``uint32[P]``.
        """
        rules = await self.rules(request)
        if (refusal := unserved(rules, request)) is not None:
            return EngineForm(
                request, CallPrompt(None, link.break_reason), (), rules, self._pool, refusal
            )
        request, notes = self.fitted(request)
        written = None
        if self._pool.external:
            restored = with_upstream_fields(request.messages, session.turns)
            request = structs.replace(request, messages=restored)
        ids = session.turns.engine_ids
        as_it_is = rules is None or rules == TAKES_ALL
        if as_it_is and link.written is not None and self._may_be_written(link):
            written = written_messages(request.messages, ids, link.written)
        elif ids:
            request = structs.replace(request, messages=with_engine_ids(request.messages, ids))
        if ids and link.base is not None:
            link = structs.replace(link, tail=with_engine_ids(link.tail, ids))
        if rules is not None and rules != TAKES_ALL:
            messages, shaped = rules.shape(request.messages)
            notes += shaped
            if request.tools and not rules.tools_shown:
                notes += (Note(TOOLS_NOT_SHOWN),)
            head = 0
            while head < len(messages) and messages[head].role == "system":
                head += 1
            request = structs.replace(request, messages=messages)
            link = structs.replace(link, tail=rules.shape_tail(link.tail), head=head)
        prompt = await self._prompt(session, link, request, recorded)
        notes += prompt.notes
        return EngineForm(request, prompt, notes, rules, self._pool, written=written)

    def fitted(self, request: Request) -> tuple[Request, tuple[Note, ...]]:
        """Return ``request`` with an effort and tools that the local template takes, and notes."""
        if self._continuer is None:
            return request, ()
        report = self._continuer.report
        request, notes = with_taken_effort(report.refused_efforts, request)
        if report.bare_tools_refused:
            request, added = with_parameters(request)
            notes += added
        return request, notes

    def reasoning_length(self, reply: Reply) -> int:
        """Return how many of the first tokens of ``reply`` are surely of its reasoning.

        These are the tokens whose text ends with the reasoning, without the mark that closes it.
        The number is 0 if the tokenizer is not at hand, and for several choices.
        """
        if self._continuer is None or len(reply.choices) != 1:
            return 0
        (choice,) = reply.choices
        reasoning, ids = choice.reasoning.strip(), plain_ids(choice.token_ids) or []
        tokenizer = self._continuer.tokenizer

        def holds(count: int) -> bool:
            return reasoning in tokenizer.decode(ids[:count])

        if not reasoning or not holds(len(ids)):
            return 0
        return bisect_left(range(len(ids)), True, key=holds)

    def _may_be_written(self, link: Link) -> bool:
        """Return whether nobody needs the messages in another form than JSON for the engine.

        The upstream's own fields are added to single messages, and the check of the rendering reads
        those of calls that continue no other.
        """
        return not self._pool.external and link.parent is not None

    async def _prompt(
        self, session: Session, link: Link, request: Request, recorded: TokenIds | None
    ) -> CallPrompt:
        continuer, exact = self._continuer, session.record.continuation is Continuation.EXACT
        if continuer is None or not exact or request.prompt is not None:
            return CallPrompt(None, link.break_reason)
        if recorded is not None:
            prompt = CallPrompt(recorded, link.break_reason, recorded=True)
        elif continuer.takes_long(link):
            prompt = await asyncio.to_thread(continuer.prompt, link, request, session.prompt)
        else:
            prompt = continuer.prompt(link, request, session.prompt)
        if (
            prompt.token_ids is not None
            and (recorded is not None or _continues_replayed(link))
            and not continuer.reads(prompt.token_ids, request.messages)
        ):
            # The record is of a model with another tokenizer.
            reason = link.break_reason or BreakReason.TOKENIZER_DIFFERS
            return CallPrompt(None, reason, notes=(Note(TOKENIZER_DIFFERS),))
        if prompt.token_ids is not None and self.check is not None:
            home = session.homes.get(self._pool)
            if home is None or not home.rendering.agrees:
                found = await self.check.objection(home, self._pool, request.model)
                if found is not None:
                    reason = link.break_reason or BreakReason(found)
                    return CallPrompt(None, reason, notes=(Note(found),))
        return prompt

    async def rules(self, request: Request) -> RoleRules | None:
        """Return the rules about roles for ``request``.

        Return ``None`` if they cannot be found out, or if the engine need not be asked because the
        messages are ordinary.
        """
        if request.prompt is not None:
            return TAKES_ALL
        if self._known:
            return self._rules
        if is_ordinary(request.messages):
            return None
        async with self._asking:
            if not self._known:
                try:
                    self._rules, self._known = await self._ask(request.model), True
                except ApiError as error:
                    # The call meets the same fault, or the next one asks again.
                    log.info("roles_not_asked", extra={"reason": error.message})
            return self._rules

    async def _ask(self, model: str) -> RoleRules | None:
        """Derive the rules from the engine's own renderings.

        Return ``None`` if it reports none. Raises :class:`ApiError`.
        """
        room = asyncio.Semaphore(_AT_ONCE)

        async def answer(question: Question) -> list[int] | None:
            messages = [message.to_chat() for message in question.messages]
            async with room:
                return await self._pool.tokenize(messages, model, TOOLS if question.tools else ())

        if await answer(_PLAIN) is None:
            return None
        return rules_from(await asyncio.gather(*map(answer, QUESTIONS)))


def _continues_replayed(link: Link) -> bool:
    """Return whether a request continues a call that has its ids from another session's record."""
    tip = None if link.base is None else link.base.tip(link.choice)
    # The span of a replayed reply begins within the prompt.
    return link.base is not None and tip is not None and tip.start < link.base.prompt_length


class RenderingCheck:
    """A comparison of one tokenizer with the engines of one pool."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._one_at_a_time = asyncio.Lock()
        self._probe_agreed = False
        self._probe_differs = False
        self._asked_at = float("-inf")

    async def compare(
        self,
        engine: PooledEngine,
        ask: EngineRequest,
        prompt: Sequence[int] | TokenIds | None,
        call_id: str,
        started_at: float,
    ) -> Note | None:
        """Compare the ``prompt`` of a complete call that continues no other, if that is due.

        ``ask`` is the request that the engine was sent. Return the note of a difference, or of a
        prompt that cannot be rendered here.
        """
        if prompt is None or not _comparable(ask, started_at):
            return None
        sent, rendering = ask.fields, engine.rendering
        period = engine.transport.connection_epoch, engine.serves.publishes
        shape = bool(sent.get("tools")), bool(sent.get("chat_template_kwargs"))
        if not rendering.due(period, shape):
            return None
        try:
            async with self._one_at_a_time:
                found = await asyncio.to_thread(self._difference, sent, token_array(prompt))
        except Exception as error:
            # Tails of messages that a template refuses are refused here too, so that the engine
            # renders them.
            if not isinstance(error, TemplateError):
                log.exception(UNCOMPARED, extra={"call": call_id})
            return Note(UNCOMPARED, type(error).__name__)
        if found is None:
            rendering.found("", period)
            return None
        at, shown = found
        rendering.found(f"its prompts differ from token {at} on (call {call_id})", period)
        extra = {"engine": engine.name, "call": call_id, "token": at}
        log.error(RENDERS_OTHERWISE, extra=extra)
        return Note(RENDERS_OTHERWISE, shown)

    async def objection(
        self, home: PooledEngine | None, engines: EnginePool, model: str
    ) -> str | None:
        """Return the name of the reason against continuing a session's call exactly.

        Return ``None`` if there is no reason. ``home`` is the engine that the session stays with;
        ``model`` is the name that the client gave. An engine that cannot be asked, or cannot be
        asked just now, is trusted.
        """
        async with self._one_at_a_time:
            if home is not None and home.rendering.difference:
                return RENDERS_OTHERWISE
            if home is not None and home.rendering.agrees:
                return None
            if not self._probe_agreed and time.monotonic() - self._asked_at > _AGAIN_S:
                with contextlib.suppress(ApiError):  # the call that waits will meet the same fault
                    self._compare_probe(await engines.tokenize(PROBE, model), model)
        return TOKENIZER_DIFFERS if self._probe_differs else None

    def _difference(self, sent: Mapping[str, Any], theirs: TokenIds) -> tuple[int, str] | None:
        """Return the first index at which the engine's ids differ from the local ones, and a text.

        The ids are those of the engine's prompt and of the local rendering. The text shows both
        sides at the index. Return ``None`` if they are equal. Raises :class:`TemplateError`.
        """
        arguments = sent.get("chat_template_kwargs") or {}
        text = self._tokenizer.render(sent["messages"], sent.get("tools"), **arguments)
        ours = token_array(self._tokenizer.encode(text))
        at = common_prefix(ours, theirs)
        if at == len(ours) == len(theirs):
            return None
        engine, here = (
            self._tokenizer.decode(ids[at : at + _SHOWN].tolist()) for ids in (theirs, ours)
        )
        return at, f"from token {at} on the engine has {engine!r}, the rendering here {here!r}"

    def _compare_probe(self, ids: list[int] | None, model: str) -> None:
        self._asked_at = time.monotonic()
        # Rendered anew each time: a template may tell the day.
        ours = self._tokenizer.encode(self._tokenizer.render(PROBE))
        before, self._probe_differs = self._probe_differs, ids is not None and ids != ours
        self._probe_agreed = not self._probe_differs
        extra = {"tokenizer": str(self._tokenizer.directory), "model": model}
        if ids is None:
            log.warning("tokenizer_unchecked", extra=extra)
        elif self._probe_differs and not before:
            log.error(TOKENIZER_DIFFERS, extra=extra)


def _comparable(ask: EngineRequest, started_at: float) -> bool:
    """Return True if the engine's rendering can be repeated here.

    It can for a chat request of text alone that was rendered today, because a template may contain
    the date.
    """
    fields = ask.fields
    if ask.path != CHAT_COMPLETIONS or not _RENDERING.isdisjoint(fields):
        return False
    if not _RENDERING.isdisjoint(fields.get("chat_template_kwargs") or ()):
        return False
    if datetime.fromtimestamp(started_at).date() != datetime.now().date():
        return False
    contents = (message.get("content") for message in fields["messages"])
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(part.get("type") == "text" for part in parts)
