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
def proxy_before(store: str, engine: str | Path) -> Iterator[tuple[str, str]]:
    """Run a proxy on ``store`` in front of an engine, given by its URL or by the model's directory.

    Yield its base URL and its admin key. Raise :class:`bridle.run.services.ServiceFailed`.
    """
    with ExitStack() as opened:
        logs = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bridle-replay-")))
        key = key_in(UPSTREAM_KEY_VARIABLE)
        tokenizer: Path | None
        if isinstance(engine, Path):
            key, tokenizer = new_key(), engine
            url = opened.enter_context(engine_service("embedded", engine, logs, key=key)).url
        else:
            url = engine
            tokenizer = examine(url, api_key=key, model=None, external=False, wait_s=0.0).tokenizer
        yield opened.enter_context(proxy(url, tokenizer, store, logs, key=key))
