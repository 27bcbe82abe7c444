"""The rules about message roles of the model that a call goes to.

The policies' rules come from the local tokenizer. If a model's template is not at hand, its engine
is asked: its ``/tokenize`` renders the questions of :mod:`bridle.proxy.continuation.roles`, once
for each pool of engines, before the first request that some template might refuse.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Final

from bridle.proxy.continuation.roles import (
    QUESTIONS,
    TOOLS,
    Question,
    RoleRules,
    is_ordinary,
    rules_from,
)
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.wire.canonical import ApiError, Message, Request

log = logging.getLogger("bridle.proxy")

_AT_ONCE: Final = 8
_PLAIN: Final = Question((Message("user", "Ready?"),))


class TemplateRoles:
    """The role rules of every pool of engines."""

    def __init__(self, policies: RoleRules | None) -> None:
        """Create the table.

        ``policies`` are the rules of the policies' template, or ``None`` if it is not at hand.
        """
        self._policies = policies
        self._asked: dict[EnginePool, RoleRules | None] = {}
        self._asking: defaultdict[EnginePool, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, to: EnginePool, request: Request) -> RoleRules | None:
        """Return the rules for ``request``.

        Return ``None`` if they cannot be found out, or if the engine need not be asked because the
        messages are ordinary.
        """
        if request.prompt is not None or to.external:
            return RoleRules()
        if self._policies is not None and to.trained:
            return self._policies
        if is_ordinary(request.messages):
            return None
        if to in self._asked:
            return self._asked[to]
        async with self._asking[to]:
            if to not in self._asked:
                try:
                    self._asked[to] = await _ask(to, request.model)
                except ApiError as error:
                    # The call meets the same fault, or the next one asks again.
                    log.info("roles_not_asked", extra={"reason": error.message})
                    return None
            return self._asked[to]


async def _ask(engines: EnginePool, model: str) -> RoleRules | None:
    """Derive the rules from the engine's own renderings.

    Return ``None`` if it reports none. Raises :class:`ApiError`.
    """
    room = asyncio.Semaphore(_AT_ONCE)

    async def answer(question: Question) -> list[int] | None:
        messages = [message.to_chat() for message in question.messages]
        async with room:
            return await engines.tokenize(messages, model, TOOLS if question.tools else ())

    if await answer(_PLAIN) is None:
        return None
    return rules_from(await asyncio.gather(*map(answer, QUESTIONS)))
