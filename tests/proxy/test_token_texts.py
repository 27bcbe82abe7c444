"""A recorded session can be read as text where its tokenizer is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx


def test_the_texts_of_a_sessions_tokens_are_in_the_store(
    stage: Any, start_proxy: Any, model_dir: Path, ask: dict[str, Any]
) -> None:
    for _ in range(2):  # a proxy that starts again keeps no second copy
        bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
        url = f"{bench.server.base_url}/v1/chat/completions"
        reply = httpx.post(url, json=ask | {"max_tokens": 20}, trust_env=False)
        text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
        session = list(bench.reader.sessions())[-1]
        pieces = bench.reader.vocabulary(session.vocabulary)
        (call,) = bench.reader.calls(session.id)
        (choice,) = bench.reader.sampled(call.id)
        said = b"".join(pieces[token] for token in choice.token_ids).decode()
        assert text.strip()
        assert said.removesuffix("<|im_end|>").strip() == text.strip()


def test_a_session_without_a_tokenizer_names_no_vocabulary(bench: Any, ask: dict[str, Any]) -> None:
    url = f"{bench.server.base_url}/v1/chat/completions"
    httpx.post(url, json=ask, trust_env=False).raise_for_status()
    (session,) = bench.reader.sessions()
    assert session.vocabulary is None
