"""The explanation of breaks, off the path of calls: after the commit, in a thread.

A call that leaves its parent's ids is committed as ``unexplained``, and its row is updated when the
texts have been compared, a moment later. A session is sealed, and the store closed, only after
that. Other work that is done about a call after its commit (:meth:`Explanations.run`) is awaited in
the same way. A break that a crash leaves behind stays ``unexplained``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from bridle.proxy.continuation.breaks import explain
from bridle.proxy.lineage.turn import Link
from bridle.proxy.wire.canonical import Request
from bridle.store.call import CallEnded
from bridle.store.errors import StoreUnavailable
from bridle.store.records import ALSO_BROKE_ON, BreakReason, Note
from bridle.store.writing.writer import Writer

if TYPE_CHECKING:
    from bridle.engine.contract.tokenizer import Tokenizer

log = logging.getLogger("bridle.proxy")

Count = Callable[[BreakReason, tuple[Note, ...]], None]


class Explanations:
    """The tasks that explain breaks, one for each; :meth:`drain` waits for them."""

    def __init__(self, writer: Writer, tokenizer: Tokenizer | None, count: Count) -> None:
        """``count`` gets every break's reason and the notes that came with it."""
        self._writer = writer
        self._tokenizer = tokenizer
        self._count = count
        self._pending: dict[asyncio.Task[None], str] = {}
        """The session of the call that each task is about, by task."""

    def begin(self, ended: CallEnded, link: Link, request: Request) -> None:
        """Start the explanation of a call that has been committed as ``UNEXPLAINED``."""
        self.run(self._explain(ended, link, request), ended.session_id)

    def run(self, work: Coroutine[Any, Any, None], session_id: str) -> asyncio.Task[None]:
        """Start ``work`` about a call of the session."""
        task = asyncio.create_task(work, name="after-commit")
        self._pending[task] = session_id
        task.add_done_callback(self._pending.pop)
        return task

    async def drain(self, session_id: str | None = None) -> None:
        """Wait until the breaks so far of the session (of every session if ``None``) are explained,
        and the other work about its calls is done."""
        waiting = [task for task, of in self._pending.items() if session_id in (None, of)]
        if waiting:
            await asyncio.wait(waiting)

    async def _explain(self, ended: CallEnded, link: Link, request: Request) -> None:
        reason = BreakReason.UNEXPLAINED
        notes: tuple[Note, ...] = ()
        try:
            reason, notes = await asyncio.to_thread(self._found, ended, link, request)
            if notes or reason is not BreakReason.UNEXPLAINED:
                await self._writer.explain_break(ended.id, reason, (*ended.notes, *notes))
        except StoreUnavailable as error:
            log.warning("break_not_explained", extra={"call": ended.id, "error": str(error)})
        except Exception:
            log.exception("break_not_explained", extra={"call": ended.id})
        self._count(reason, notes)

    def _found(
        self, ended: CallEnded, link: Link, request: Request
    ) -> tuple[BreakReason, tuple[Note, ...]]:
        if ended.prompt_token_ids is None or ended.growth is None:
            return BreakReason.UNEXPLAINED, ()
        first, *others = explain(
            self._tokenizer, link, request, ended.prompt_token_ids, ended.growth.shared
        )
        notes = tuple(Note(ALSO_BROKE_ON, reason.value) for reason in others)
        if self._tokenizer is None:
            notes = (Note("break_reason_inferred", first.value), *notes)
        return first, notes
