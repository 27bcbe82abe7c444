"""A small synchronous client of an engine's control routes, for the trainer.

It speaks the contract of ``engine/contract/contract.py``, so it drives vLLM and our own engines
alike. Data traffic (completions of agents) does not go through here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract import contract
from bridle.engine.contract.contract import ModelCard, PauseMode
from bridle.errors import BridleError


class EngineError(BridleError):
    """An engine could not do what was asked of it."""


class EngineUnreachable(EngineError):
    """The engine did not reply: nothing listens there, the connection broke, or the time was up."""

    retryable = True


class EngineRefused(EngineError):
    """The engine replied with an error, or with something that is not the contract."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the refusal; ``None`` when a 2xx reply broke the contract."""


def connection(base_url: str, *, timeout: float, api_key: str | None) -> httpx.Client:
    """Return an HTTP client of one engine.

    It uses no environment proxies and a new connection for each request.

    vLLM drops the connection after an error that it did not foresee. The next request, often the
    resume after a failed reload, must not be sent on that connection.
    """
    return httpx.Client(
        base_url=base_url,
        timeout=timeout,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        trust_env=False,
        limits=httpx.Limits(max_keepalive_connections=0),
    )


class EngineClient:
    """Control client of the engine at ``base_url`` (no ``/v1``); a context manager.

    ``timeout`` is in seconds and covers one request as a whole: ``pause(mode="wait")`` lasts as
    long as the longest running reply. Environment proxies are not used: an engine is a peer.
    """

    def __init__(
        self, base_url: str, *, timeout: float = 120.0, api_key: str | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = connection(self.base_url, timeout=timeout, api_key=api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def healthy(self) -> bool:
        """Return whether the engine answers ``/health`` with 200 now."""
        try:
            return self._http.get(contract.HEALTH).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def model(self) -> ModelCard:
        """Return the first served model."""
        reply = self._send("GET", contract.MODELS)
        cards = reply.get("data")
        if not isinstance(cards, list) or not cards:
            raise EngineRefused(f"{self.base_url}{contract.MODELS} lists no model")
        card = cards[0]
        return ModelCard(card["id"], card.get("max_model_len"), card.get("root"))

    def pause(self, mode: PauseMode = "wait", clear_cache: bool = True) -> None:
        """Stop generating: freeze running requests, wait for them, or abort them."""
        params = {"mode": mode, "clear_cache": "true" if clear_cache else "false"}
        self._send("POST", contract.PAUSE, params=params)

    def resume(self) -> None:
        """Go on generating after :meth:`pause`."""
        self._send("POST", contract.RESUME)

    def is_paused(self) -> bool:
        """Return whether the engine is paused now: it then takes requests and answers none."""
        return bool(self._send("GET", contract.IS_PAUSED).get("is_paused"))

    def reload_weights(self, directory: str | Path) -> None:
        """Replace the served weights by those in ``directory``; call it while paused.

        The engine must see the same path, and afterwards the caller should verify with
        :meth:`score`: an engine may accept a reload and still serve stale layers.
        """
        path = str(Path(directory).absolute())
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._send("POST", contract.COLLECTIVE_RPC, json=body)

    def score(self, token_ids: Sequence[int], *, model: str | None = None) -> NDArray[np.float32]:
        """Return the logprob of each id given its predecessors: ``float32[T-1]`` for ``T`` ids.

        There must be at least two ids. ``T`` must leave room for one more token in the model's
        context. ``model`` is a served name, by default the first one.
        """
        return _prompt_logprobs(*self._scored(token_ids, model))

    def score_with_texts(
        self, token_ids: Sequence[int]
    ) -> tuple[NDArray[np.float32], dict[int, str]]:
        """Return what :meth:`score` does, and the engine's text of each id but the first."""
        reply, ids = self._scored(token_ids, None)
        scores = _prompt_logprobs(reply, ids)
        entries = reply["choices"][0]["prompt_logprobs"]
        texts = {
            token_id: entry[str(token_id)].get("decoded_token")
            for token_id, entry in zip(ids[1:], entries[1:], strict=True)
        }
        return scores, {token_id: text for token_id, text in texts.items() if text is not None}

    def _scored(
        self, token_ids: Sequence[int], model: str | None
    ) -> tuple[Mapping[str, Any], list[int]]:
        ids = [int(token_id) for token_id in token_ids]
        if len(ids) < 2:
            raise ValueError("scoring needs at least two token ids")
        body = {
            "model": model or self.model().id,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        return self._send("POST", contract.COMPLETIONS, json=body), ids

    def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Send a request and return the engine's reply.

        Raise :class:`EngineError` if there is none, or if it is an error.
        """
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise EngineUnreachable(
                f"{method} {self.base_url}{path}: {type(error).__name__} {error}; "
                "is the engine running?"
            ) from error
        if response.is_error:
            raise EngineRefused(
                f"{method} {self.base_url}{path} answered {response.status_code}: "
                f"{_error_message(response)}",
                status=response.status_code,
            )
        return response

    def _send(self, method: str, path: str, **kwargs: Any) -> Mapping[str, Any]:
        """Send a request and return the JSON object of the reply, or an empty one."""
        response = self._request(method, path, **kwargs)
        if not response.content:
            return {}
        try:
            body = response.json()
        except ValueError as error:
            raise EngineRefused(f"{method} {self.base_url}{path} did not answer JSON") from error
        return body if isinstance(body, dict) else {}


def _error_message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else str(body)[:500]


def _prompt_logprobs(reply: Mapping[str, Any], ids: list[int]) -> NDArray[np.float32]:
    """Read ``choices[0].prompt_logprobs``: ``[null, {"ID": {"logprob": …}}, …]``."""
    choices = reply.get("choices") or [{}]
    entries = choices[0].get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise EngineRefused("the engine's reply has no prompt_logprobs for the scored ids")
    try:
        values = [
            entry[str(token_id)]["logprob"]
            for token_id, entry in zip(ids[1:], entries[1:], strict=True)
        ]
    except (KeyError, TypeError) as error:
        raise EngineRefused(f"prompt_logprobs lack a scored id: {error!r}") from error
    return np.asarray(values, dtype=np.float32)
