"""A proxy of a command's own, in front of another engine than the one that was recorded with."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bridle.keys import UPSTREAM_KEY_VARIABLE
from bridle.run.environment import key_in
from bridle.run.stack import engine_service, new_key, proxy
from bridle.run.upstream import examine


@contextlib.contextmanager
def proxy_before(
    store: str, *, engine: str | None = None, policy: Path | None = None
) -> Iterator[tuple[str, str]]:
    """Run a proxy on ``store`` in front of ``engine``, or of an embedded one for ``policy``.

    Yield its base URL and its admin key. Raise :class:`bridle.run.services.ServiceFailed`.
    """
    with ExitStack() as opened:
        logs = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bridle-replay-")))
        key = key_in(UPSTREAM_KEY_VARIABLE)
        if policy is not None:
            key = new_key()
            engine = opened.enter_context(engine_service("embedded", policy, logs, key=key)).url
        if engine is None:
            raise ValueError("neither an engine nor a policy is named")
        tokenizer = policy
        if tokenizer is None:
            found = examine(engine, api_key=key, model=None, external=False, wait_s=0.0)
            tokenizer = found.tokenizer
        yield opened.enter_context(proxy(engine, tokenizer, store, logs, key=key))
