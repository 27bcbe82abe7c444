"""Whether the engine makes the same token ids of a conversation as the tokenizer at hand.

Exact continuation puts new ids behind those of the engine. Made by another model's tokenizer or
template they would be nonsense that nothing else notices: the engine takes any ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.wire.canonical import ApiError

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
        self._tokenizer = tokenizer
        self.agreed = False
        self._differs = False
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def allows(self, engines: EnginePool, model: str) -> bool:
        """Whether calls may be continued exactly: not while the engine disagrees. An engine that
        cannot be asked, or not just now, is trusted. ``model`` as the client named it."""
        async with self._asking:
            if not self.agreed and time.monotonic() - self._asked_at > _AGAIN_S:
                with contextlib.suppress(ApiError):  # the call that waits will meet the same fault
                    self._compare(await engines.tokenize(PROBE, model), model)
        return not self._differs

    def _compare(self, ids: list[int] | None, model: str) -> None:
        self._asked_at = time.monotonic()
        # Rendered anew each time: a template may tell the day.
        ours = self._tokenizer.encode(self._tokenizer.render(PROBE))
        before, self._differs = self._differs, ids is not None and ids != ours
        self.agreed = not self._differs
        extra = {"tokenizer": str(self._tokenizer.directory), "model": model}
        if ids is None:
            log.warning("tokenizer_unchecked", extra=extra)
        elif self._differs and not before:
            log.error("tokenizer_differs", extra=extra)
