"""Pausing, reloading and resuming, through the control client that the trainer uses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bridle.engine.contract.client import EngineClient, EngineRefused, EngineUnreachable

LONG = 900
"""Tokens of a reply that leaves time to interfere."""
PATIENCE_S = 120.0
"""The seconds that one of them may take, also from a machine that is busy elsewhere."""


@pytest.fixture
def control(api: Any) -> Iterator[EngineClient]:
    with EngineClient(api.base_url, timeout=PATIENCE_S) as client:
        yield client
        client.resume()


class Background:
    """A reply that is read in a thread of its own."""

    def __init__(self, api: Any, asked: str, **extra: Any) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.began = threading.Event()
        self._api = api
        self._body = api.ask(asked, stream=True, **extra)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._api.http.stream("POST", "/v1/chat/completions", json=self._body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.chunks.append(json.loads(line[6:]))
                    if len(self.chunks) >= 3:
                        self.began.set()

    def settled(self) -> Any:
        """Return the reply so far, once nothing has come for a while."""
        seen = -1
        while seen < len(self.chunks):
            seen = len(self.chunks)
            time.sleep(0.4)
        return self._api.fold(self.chunks[:seen])

    def result(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self._api.fold(self.chunks)


def long_reply(api: Any) -> Background:
    return Background(api, "count", ignore_eos=True, max_tokens=LONG)


def frozen_in_mid_reply(api: Any, control: EngineClient) -> tuple[Background, Any]:
    """A reply that is paused (``keep``) after its beginning and before its end, and what it has.

    A fast engine is done before a pause that waits for its first chunks reaches it. So the reply is
    asked for while the engine is paused, which then runs for a moment, and again with another reply
    when the moment was too long.
    """
    for _ in range(20):
        control.pause("keep", clear_cache=False)
        running = long_reply(api)
        time.sleep(0.2)
        seen = running.settled()
        while not seen.token_ids:
            control.resume()
            control.pause("keep", clear_cache=False)
            seen = running.settled()
        if seen.finish_reason is None:
            return running, seen
        control.resume()
    raise AssertionError("no reply was slow enough to be paused in its middle")


def test_the_model_card_is_read(api: Any, control: EngineClient) -> None:
    assert control.healthy()
    card = control.model()
    assert card.id == api.model
    assert card.max_model_len == 1024


def test_scores_are_one_logprob_per_id_but_the_first(api: Any, control: EngineClient) -> None:
    ids = api.tokenize("The answer is forty two")
    scores = control.score(ids)
    assert scores.shape == (len(ids) - 1,)
    assert scores.dtype == np.float32
    assert (scores <= 0).all()


def test_no_reply_begins_while_paused_and_it_is_answered_after_resuming(
    api: Any, control: EngineClient
) -> None:
    control.pause("wait")
    assert api.http.get("/is_paused").json() == {"is_paused": True}
    held = Background(api, "text")
    time.sleep(0.3)
    assert not held.chunks
    control.resume()
    assert api.http.get("/is_paused").json() == {"is_paused": False}
    assert held.result().content == api.replies["text"][1][0]


@pytest.mark.policy
def test_pause_keep_freezes_a_stream_and_resume_goes_on_with_it(
    api: Any, control: EngineClient
) -> None:
    running, seen = frozen_in_mid_reply(api, control)
    assert 0 < len(seen.token_ids) < LONG
    assert seen.finish_reason is None
    control.resume()
    fold = running.result()
    assert len(fold.token_ids) == LONG
    assert fold.finish_reason == "length"


@pytest.mark.policy
def test_pause_wait_lets_running_replies_end(api: Any, control: EngineClient) -> None:
    running = long_reply(api)
    assert running.began.wait(PATIENCE_S)
    control.pause("wait")
    assert len(running.result().token_ids) == LONG


@pytest.mark.policy
def test_pause_abort_ends_running_replies(api: Any, control: EngineClient) -> None:
    running, _ = frozen_in_mid_reply(api, control)
    control.pause("abort")
    fold = running.result()
    assert 0 < len(fold.token_ids) < LONG
    assert fold.finish_reason == "abort"


def test_an_unknown_pause_mode_is_refused(api: Any) -> None:
    assert api.http.post("/pause", params={"mode": "perhaps"}).status_code in (400, 422)


@pytest.mark.policy
def test_weights_can_be_reloaded_while_paused(api: Any, control: EngineClient) -> None:
    ids = api.tokenize("The answer is forty two")
    root = control.model().root
    assert root is not None
    before = control.score(ids)
    control.pause("wait")
    control.reload_weights(root)
    control.resume()
    np.testing.assert_allclose(control.score(ids), before, atol=1e-4)
    assert api.chat("text")["choices"][0]["message"]["content"] == api.replies["text"][1][0]


@pytest.mark.policy
def test_a_stream_goes_on_over_a_reload(api: Any, control: EngineClient) -> None:
    running, _ = frozen_in_mid_reply(api, control)
    root = control.model().root
    assert root is not None
    control.reload_weights(root)
    control.resume()
    assert len(running.result().token_ids) == LONG


@pytest.mark.ours
def test_the_same_weights_have_the_same_mark(api: Any, control: EngineClient) -> None:
    def mark() -> Any:
        return api.http.get("/version").json()["weights_fingerprint"]

    before = mark()
    assert isinstance(before, str)
    control.reload_weights(control.model().root or "")
    assert mark() == before
    with pytest.raises(EngineRefused):
        control.reload_weights("/nowhere/at/all")
    assert mark() == before


@pytest.mark.ours
def test_weights_that_are_not_there_are_refused(control: EngineClient) -> None:
    with pytest.raises(EngineRefused) as refused:
        control.reload_weights("/nowhere/at/all")
    assert refused.value.status is not None
    assert refused.value.status >= 400
    assert control.healthy()


def test_an_engine_that_is_not_there_is_unreachable() -> None:
    with EngineClient("http://127.0.0.1:9", timeout=2) as client:
        assert not client.healthy()
        with pytest.raises(EngineUnreachable):
            client.model()
