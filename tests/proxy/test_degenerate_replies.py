"""A policy that repeats a tag stops nobody: its reply is echoed in a moment of the proxy's time."""

from __future__ import annotations

import time

import httpx
import pytest

from bridle.engine.scripted import ScriptedReply

_REPEATED = 16_000
_MOST_S = 1.0
"""CPU time of both calls, engine and client included, which run in this process as well. The
square of the tags alone took 4.6 s."""


@pytest.mark.parametrize("tag", ["<think>", "<think></think>", "-"])
def test_a_reply_of_one_tag_is_echoed_in_a_moment(stage, bench, tag):
    text = tag * _REPEATED
    stage.play = lambda _: ScriptedReply("fine")
    asked = [{"role": "user", "content": "go"}]
    body = {"model": "m", "messages": asked}
    httpx.post(f"{bench.url}/v1/chat/completions", json=body)
    again = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    small = [*asked, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "on"}]
    url = f"{bench.url}/v1/chat/completions"
    taken = []
    for messages in (small, again):
        started = time.process_time()
        reply = httpx.post(url, json={"model": "m", "messages": messages}, timeout=60)
        taken.append(time.process_time() - started)
        assert reply.status_code == 200
    assert taken[1] - taken[0] < _MOST_S
