"""Ask an OpenAI-compatible server, before the first call, what it offers a recorder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bridle.keys import UPSTREAM_KEY_VARIABLE
from bridle.proxy.settings import engine_base
from bridle.run.hub import cached_tokenizer

_PATIENCE_S: Final = 10.0
"""Maximum seconds for one reply: an engine may be compiling, or serving others."""
_BETWEEN_S: Final = 0.25
_LONGEST: Final = 160
"""Maximum characters of the upstream's own words that are repeated."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The result of probing an upstream."""

    url: str
    model: str | None = None
    """The first model that it lists."""
    tokenizer: Path | None = None
    """The directory of the model's tokenizer on this machine, if it is here."""
    token_ids: bool | None = None
    """True if it returns token ids; ``None`` if it did not answer that."""
    problem: str = ""
    """The reason why recording is not exact there, or calls fail, and the remedy; empty if there is
    no problem."""


def examine(
    url: str, *, api_key: str | None, model: str | None, external: bool, wait_s: float
) -> Upstream:
    """Ask an upstream for its models, and, unless it is ``external``, for one token with its id.

    ``wait_s`` is the time to wait until something listens there, in seconds.
    """
    root = engine_base(url)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    with httpx.Client(
        base_url=root, headers=headers, timeout=_PATIENCE_S, trust_env=False
    ) as client:
        try:
            cards = _models(client, wait_s)
            listed = str(cards[0]["id"]) if cards else None
            named = model or listed
            tokenizer = None if external else _tokenizer(cards, named)
            found = Upstream(url, model=listed, tokenizer=tokenizer)
            if external or named is None:
                return found
            return _asked_for_ids(client, found, named)
        except httpx.TimeoutException:
            problem = f"it did not answer within {_PATIENCE_S:g} s, so nothing is known of it"
            return Upstream(url, problem=problem)
        except httpx.HTTPError:
            problem = "nothing listens there yet: calls fail until something does"
            return Upstream(url, problem=problem)


def _models(client: httpx.Client, wait_s: float) -> list[dict[str, Any]]:
    """Return the upstream's model cards; there are none if it lists no models."""
    until = time.monotonic() + wait_s
    while True:
        try:
            reply = client.get("/v1/models")
            break
        except httpx.ConnectError:
            if time.monotonic() >= until:
                raise
            time.sleep(_BETWEEN_S)
    try:
        cards = reply.json()["data"]
        return [card for card in cards if "id" in card]
    except (ValueError, KeyError, TypeError):
        return []


def _tokenizer(cards: list[dict[str, Any]], named: str | None) -> Path | None:
    """Return the tokenizer's directory by the model's name, or by the ``root`` on its card.

    vLLM and our engines put the ``root`` there.
    """
    for card in cards:
        if card["id"] == named:
            roots = (card.get("root"), named)
            found = (cached_tokenizer(root) for root in roots if isinstance(root, str))
            return next((each for each in found if each is not None), None)
    return None


def _asked_for_ids(client: httpx.Client, found: Upstream, model: str) -> Upstream:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = client.post("/v1/chat/completions", json=asked)
    token_ids: bool | None = None
    if reply.status_code in (401, 403):
        problem = f"it refuses the key ({_words(reply)}): set {UPSTREAM_KEY_VARIABLE}"
    elif reply.status_code in (400, 404, 422):
        problem = (
            f"it refuses what a recorder asks for ({_words(reply)}): start the proxy with "
            "--external, which records text and asks for no token ids"
        )
    elif reply.status_code != 200:
        problem = f"it answers {reply.status_code} ({_words(reply)}): calls will fail as well"
    elif _has_ids(reply):
        token_ids, problem = True, ""
    else:
        token_ids = False
        problem = (
            "it returns no token ids, so conversations are recorded as text and nothing of them "
            "can be trained. vLLM returns them; a router between must pass on return_token_ids. "
            "If text is all you want, --external says so"
        )
    return Upstream(
        found.url,
        model=found.model,
        tokenizer=found.tokenizer,
        token_ids=token_ids,
        problem=problem,
    )


def _has_ids(reply: httpx.Response) -> bool:
    try:
        return bool(reply.json()["choices"][0].get("token_ids"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return False


def _words(reply: httpx.Response) -> str:
    """Return the upstream's message in an error, on one line."""
    try:
        body = reply.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        text = reply.text
    return " ".join(text.split())[:_LONGEST] or f"status {reply.status_code}"
