"""The control client tells refusals, which are final, from failures, which are not."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from bridle.harnesses.client import Client, ControlError, ProxyUnreachable, SessionRequest
from bridle.harnesses.tasks.task import Task


async def test_a_session_is_created_with_what_was_asked_and_no_more(stand_in: Any) -> None:
    task = Task("t", "secret prompt", payload={"answer": 1}, files={"a": "b"})
    async with Client(stand_in.url, "admin") as client:
        session = await client.create_session(
            SessionRequest(name="mine", run_id="r", task=task, settings={"pin": {"seed": 1}})
        )

    assert session.id == "ses_0"
    assert session.base_urls["openai"] == f"{stand_in.url}/s/ses_0/v1"
    assert stand_in.sessions["ses_0"] == {
        "name": "mine",
        "run_id": "r",
        "settings": {"pin": {"seed": 1}},
        "task": {"id": "t", "suite": "default", "split": "train", "payload": {"answer": 1}},
    }


async def test_rewards_and_seals_arrive(stand_in: Any) -> None:
    async with Client(stand_in.url) as client:
        await client.reward("ses_0", "reward", 0.5, verifier_key="brv_0", detail={"why": "half"})
        await client.seal("ses_0", "timeout")
        policy = await client.policy()

    assert stand_in.rewards == [
        {
            "session": "ses_0",
            "name": "reward",
            "value": 0.5,
            "kind": "score",
            "key": "Bearer brv_0",
            "detail": {"why": "half"},
        }
    ]
    assert stand_in.sealed == {"ses_0": "timeout"}
    assert policy == {"version": 3}


async def test_a_refusal_is_final_and_says_why(stand_in: Any) -> None:
    async with Client(stand_in.url) as client:
        with pytest.raises(ControlError, match="404") as refused:
            await client.session("unknown")

    assert refused.value.status == 404


async def test_a_server_error_may_be_tried_again(stand_in: Any) -> None:
    stand_in.failing = 1
    async with Client(stand_in.url) as client:
        with pytest.raises(ProxyUnreachable, match="503"):
            await client.create_session(SessionRequest())
        await client.create_session(SessionRequest())


async def test_an_answer_that_cannot_be_read_is_said_with_who_gave_it(stand_in: Any) -> None:
    stand_in.misencoding_seals = True
    async with Client(stand_in.url) as client:
        with pytest.raises(ProxyUnreachable, match=f"{stand_in.url}.* cannot be read"):
            await client.seal("ses_0", "completed")


async def test_a_web_server_that_is_no_proxy_is_found_out(stand_in: Any) -> None:
    stand_in.garbling = True
    async with Client(stand_in.url) as client:
        with pytest.raises(ControlError, match="answered 201: not as Bridle does"):
            await client.create_session(SessionRequest())


async def test_no_proxy_there_is_said_with_its_address() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ProxyUnreachable, match=str(port)):
            await client.create_session(SessionRequest())


async def test_no_answer_has_a_cause_also_where_the_error_has_no_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Client(url, timeout_s=0.1) as client:
            with pytest.raises(ProxyUnreachable, match=r"no answer from .*: ReadTimeout\. Is"):
                await client.create_session(SessionRequest())
