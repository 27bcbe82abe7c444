"""Whether the engine makes the same token ids of a conversation as the tokenizer at hand.

Exact continuation puts new ids behind those of the engine. Made by another model's tokenizer or
template they would be nonsense that nothing else notices: the engine takes any ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from engine.tokenizer import Tokenizer
from proxy.canonical import ApiError
from proxy.engine_pool import EnginePool

log = logging.getLogger("bridle.proxy")

PROBE: Final[tuple[dict[str, Any], ...]] = (
    {"role": "user", "content": "Is naïve 3 × 4 = 12, or “twelve”?\n\tdef f(x): return {x: [1.5]}"},
)
"""Letters, digits, signs and white space, which no two tokenizers cut alike."""

_AGAIN_S: Final = 30.0
"""After which an engine that disagreed is asked again: it may have been started anew."""


class TokenizerCheck:
    """One tokenizer against the engines of one pool, asked until they agree."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = tokenizer.encode(tokenizer.render(PROBE))
        self._directory = tokenizer.directory
        self.agreed = False
        self._told = False
        """That they disagree."""
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def agrees(self, engines: EnginePool, model: str) -> bool:
        """Whether calls may be continued exactly. An engine that cannot tell is believed."""
        async with self._asking:
            if not self.agreed and time.monotonic() - self._asked_at > _AGAIN_S:
                await self._ask(engines, model)
        return self.agreed

    async def _ask(self, engines: EnginePool, model: str) -> None:
        try:
            ids = await engines.tokenize(PROBE, model)
        except ApiError:
            return  # the call that waits for this will be told
        self._asked_at = time.monotonic()
        self.agreed = ids is None or ids == self._ids
        extra = {"tokenizer": str(self._directory), "model": model}
        if ids is None:
            log.warning("tokenizer_unchecked", extra=extra)
        elif not self.agreed and not self._told:
            self._told = True
            log.error("tokenizer_differs", extra=extra)
