"""Check that an engine turns a conversation into the same token ids as the local tokenizer.

Exact continuation appends new ids to those of the engine. If they were made by another model's
tokenizer or template, or for an engine that does not use the template (vLLM renders gpt-oss by its
own code), they would be nonsense that nothing else notices: the engine takes any ids.

The prompt that an engine reports for a call that continues no other is compared with the local
rendering of the same request, after the call's commit and in a thread. A difference is noted on the
call, and calls of that engine are rendered in full from then on. If no such call of a session has
been compared (another process recorded it), the session is continued if the engine's own
tokenisation of a probe agrees.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from bridle.engine.contract.contract import CHAT_COMPLETIONS
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.engines.pool import EnginePool, PooledEngine
from bridle.proxy.engines.request import EngineRequest
from bridle.proxy.wire.canonical import ApiError
from bridle.store.call import CallEnded
from bridle.store.errors import StoreUnavailable
from bridle.store.records import RENDERS_OTHERWISE, Note, TokenIds, token_array
from bridle.store.tree import common_prefix
from bridle.store.writing.writer import Writer

log = logging.getLogger("bridle.proxy")

PROBE: Final[tuple[dict[str, Any], ...]] = (
    {"role": "user", "content": "Is naïve 3 × 4 = 12, or “twelve”?\n\tdef f(x): return {x: [1.5]}"},
)
"""A message of letters, digits, signs and white space, which no two tokenizers split alike."""

TOKENIZER_DIFFERS: Final = "tokenizer_differs"
UNCOMPARED: Final = "rendering_uncompared"

_AGAIN_S: Final = 30.0
"""Seconds until an engine that disagreed about the probe is asked again, because it may have been
restarted."""
_MOST_WAITING: Final = 256
_SHOWN: Final = 12
"""Number of ids on each side whose text a note shows."""

Run = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Starts a task for a session, by its id; the session is sealed only after the task has ended."""
Count = Callable[[Iterable[Note]], None]


class RenderingCheck:
    """A comparison of one tokenizer with the engines of one pool."""

    def __init__(self, tokenizer: Tokenizer, writer: Writer, run: Run, count: Count) -> None:
        """Create the check. ``count`` gets the note of every difference, and of every call that
        could not be compared."""
        self._tokenizer = tokenizer
        self._writer = writer
        self._run = run
        self._count = count
        self._comparing: dict[str, asyncio.Task[None]] = {}
        """The comparison of a session's latest call that continues no other, by session."""
        self._one_at_a_time = asyncio.Lock()
        self._probe_agreed = False
        self._probe_differs = False
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    def begin(
        self, engine: PooledEngine, ask: EngineRequest, ended: CallEnded, started_at: float
    ) -> None:
        """Start the comparison of the prompt of a committed call that continues no other. ``ask``
        is the request that the engine was sent."""
        prompt = ended.prompt_token_ids
        if prompt is None or not _comparable(ask, started_at):
            return
        if len(self._comparing) >= _MOST_WAITING:
            self._count([Note(UNCOMPARED)])
            return
        session, epoch = ended.session_id, engine.endpoint.transport.connection_epoch
        task = self._run(self._compare(engine, epoch, ask.fields, prompt, ended), session)
        self._comparing[session] = task
        task.add_done_callback(lambda done: self._over(session, done))

    async def objection(
        self, session_id: str, home: PooledEngine | None, engines: EnginePool, model: str
    ) -> str | None:
        """Return the name of the reason against continuing the session's calls exactly, or ``None``
        if there is none. ``home`` is the engine that the session stays with; ``model`` is the name
        that the client gave. An engine that cannot be asked, or cannot be asked just now, is
        trusted."""
        comparing = self._comparing.get(session_id)
        if comparing is not None:
            await asyncio.wait([comparing])
        if home is not None and home.rendering.difference:
            return RENDERS_OTHERWISE
        if home is not None and home.rendering.agrees:
            return None
        async with self._asking:
            if not self._probe_agreed and time.monotonic() - self._asked_at > _AGAIN_S:
                with contextlib.suppress(ApiError):  # the call that waits will meet the same fault
                    self._compare_probe(await engines.tokenize(PROBE, model), model)
        return TOKENIZER_DIFFERS if self._probe_differs else None

    def _over(self, session: str, done: asyncio.Task[None]) -> None:
        if self._comparing.get(session) is done:
            del self._comparing[session]

    async def _compare(
        self,
        engine: PooledEngine,
        epoch: int,
        sent: Mapping[str, Any],
        prompt: TokenIds,
        ended: CallEnded,
    ) -> None:
        try:
            async with self._one_at_a_time:
                found = await asyncio.to_thread(self._difference, sent, prompt)
        except TemplateError:
            # Tails of such messages are refused here too, so that the engine renders them.
            self._count([Note(UNCOMPARED)])
            return
        if found is None:
            engine.rendering.found("", epoch)
            return
        at, shown = found
        engine.rendering.found(f"its prompts differ from token {at} on (call {ended.id})", epoch)
        note = Note(RENDERS_OTHERWISE, shown)
        self._count([note])
        extra = {"engine": engine.name, "call": ended.id, "token": at}
        log.error(RENDERS_OTHERWISE, extra=extra)
        try:
            await self._writer.set_notes(ended.id, (*ended.notes, note))
        except StoreUnavailable as error:
            log.warning("note_not_written", extra={"call": ended.id, "error": str(error)})

    def _difference(self, sent: Mapping[str, Any], theirs: TokenIds) -> tuple[int, str] | None:
        """Return the index of the first id at which the engine's prompt and the local rendering
        differ, and a text that shows both sides there; ``None`` if they are equal. Raises
        :class:`TemplateError`."""
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


_RENDERING: Final = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "documents"}
)
"""Request fields that make the engine render in another way than is done here."""


def _comparable(ask: EngineRequest, started_at: float) -> bool:
    """Return True if the engine's rendering can be repeated here: a chat request of text alone that
    was rendered today, because a template may contain the date."""
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
