"""Each reply in each dialect: the bytes that are written, and what the provider's client reads.

``fixtures/streams`` has the bytes of every reply in every dialect. The comment ``: end`` in them
separates what goes out as the engine sends it from what waits until the call is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from support.providers import CLIENTS, Client, Read

FIXTURES = Path(__file__).parent / "fixtures" / "streams"
CALL = "call_abcdefghij234567klmnopqr"
LOOK = ToolCallDelta(0, f"{CALL}00", "look", "{}")


@dataclass(frozen=True)
class Said:
    """A reply of an engine, and how clients read it; ``reads`` names the dialects that differ."""

    events: list[Event]
    read: Read
    reads: dict[str, Read] = field(default_factory=dict)


LOOKED = Read(calls=(("look", {}),))
REPLIES = {
    "whole": Said(
        [
            Started(11),
            ReasoningDelta("hm "),
            ReasoningDelta("ok"),
            TextDelta("Hel"),
            TextDelta("lo"),
            ToolCallDelta(0, f"{CALL}00", "look", '{"a"'),
            ToolCallDelta(0, arguments=": 1}"),
            ToolCallDelta(1, f"{CALL}01", "bare"),
            Finished("tool_calls"),
            Usage(11, 7, 3, 2),
        ],
        Read("hm ok", "Hello", (("look", {"a": 1}), ("bare", {}))),
    ),
    "cut": Said(
        [Started(1), ReasoningDelta("hm"), TextDelta("Hel"), Finished("length"), Usage(1, 2)],
        Read("hm", "Hel"),
    ),
    "filtered": Said([Started(1), Finished("content_filter"), Usage(1, 1)], Read()),
    "empty": Said([Started(1), Finished("stop"), Usage(1, 1)], Read()),
    "blank before a call": Said(
        [Started(1), TextDelta("\n"), TextDelta("\n"), LOOK, Finished("tool_calls"), Usage(1, 1)],
        LOOKED,
        dict.fromkeys(("chat", "google"), Read(text="\n\n", calls=LOOKED.calls)),
    ),
    "blank before text": Said(
        [Started(1), TextDelta("\n\n"), TextDelta("Hi"), Finished("stop"), Usage(1, 1)],
        Read(text="\n\nHi"),
    ),
    "blank after text": Said(
        [Started(1), TextDelta("Hi"), TextDelta("\n"), Finished("stop"), Usage(1, 1)],
        Read(text="Hi\n"),
    ),
    "blank alone": Said(
        [Started(1), TextDelta("\n\n"), Finished("stop"), Usage(1, 1)], Read(text="\n\n")
    ),
}

in_each_dialect = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
in_every_reply = pytest.mark.parametrize("name", REPLIES)


def expected(name: str, client: Client) -> Read:
    said = REPLIES[name]
    return said.reads.get(client.dialect.name, said.read)


def emitted(client: Client, events: list[Event], mint: Any, between: bytes = b"") -> bytes:
    emitter = client.dialect.emitter(client.request, mint(client.dialect, client.request))
    pieces = [emitter.begin(), *(emitter.event(event) for event in events)]
    return b"".join([*pieces, between, emitter.end()])


@in_each_dialect
@in_every_reply
def test_the_bytes_are_those_of_the_fixture(client: Client, name: str, mint: Any) -> None:
    fixture = FIXTURES / f"{name.replace(' ', '_')}.{client.dialect.name}.sse"

    assert emitted(client, REPLIES[name].events, mint, b": end\n\n") == fixture.read_bytes()


@in_each_dialect
@in_every_reply
def test_the_client_reads_the_stream(client: Client, name: str, mint: Any, server: Any) -> None:
    server.answer(emitted(client, REPLIES[name].events, mint), "text/event-stream")

    assert client.stream(server.url) == expected(name, client)


@in_each_dialect
@in_every_reply
def test_the_client_reads_the_plain_reply(
    client: Client, name: str, mint: Any, fold: Any, server: Any
) -> None:
    minted = mint(client.dialect, client.request)
    server.answer(client.dialect.reply(client.request, minted, fold(REPLIES[name].events)))

    assert client.plain(server.url) == expected(name, client)


@in_each_dialect
@in_every_reply
def test_every_event_has_all_that_the_sdk_types_demand(
    client: Client, name: str, mint: Any
) -> None:
    """Validation is strict here, unlike in the client, which takes what it gets."""
    for block in emitted(client, REPLIES[name].events, mint).split(b"\n\n")[:-1]:
        head, _, data = block.rpartition(b"data: ")
        if data == b"[DONE]":
            continue
        event = client.event.validate_json(data)
        assert head in (b"", b"event: %b\n" % str(getattr(event, "type", "")).encode())


@in_each_dialect
def test_keep_alives_change_nothing_for_the_client(client: Client, mint: Any, server: Any) -> None:
    emitter = client.dialect.emitter(client.request, mint(client.dialect, client.request))
    stream = [emitter.begin(), emitter.keep_alive()]
    for event in REPLIES["whole"].events:
        stream += [emitter.event(event), emitter.keep_alive()]
    server.answer(b"".join([*stream, emitter.end()]), "text/event-stream")

    assert client.stream(server.url) == REPLIES["whole"].read


@in_each_dialect
@pytest.mark.parametrize("ended", [False, True])
def test_a_failure_inside_the_stream_is_raised_by_the_client(
    client: Client, ended: bool, mint: Any, server: Any
) -> None:
    """An end that was made and not sent, since the call could not be stored, changes nothing."""
    emitter = client.dialect.emitter(client.request, mint(client.dialect, client.request))
    stream = [emitter.begin(), *(emitter.event(event) for event in REPLIES["whole"].events)]
    if ended:
        emitter.end()
    stream.append(emitter.fail(ApiError("overloaded", "no engine", status=503)))
    server.answer(b"".join(stream), "text/event-stream")

    with pytest.raises(client.failure, match="no engine"):
        client.stream(server.url)


@pytest.mark.parametrize("name", ["messages", "responses"])
@pytest.mark.parametrize("between", [TextDelta("a"), ToolCallDelta(1, f"{CALL}01", "look", "{")])
def test_a_tool_call_in_scattered_pieces_is_the_engines_failure(
    name: str, between: Event, mint: Any
) -> None:
    client = CLIENTS[name]
    emitter = client.dialect.emitter(client.request, mint(client.dialect, client.request))
    emitter.event(ToolCallDelta(0, f"{CALL}00", "look", "{"))
    emitter.event(between)

    with pytest.raises(ApiError) as caught:
        emitter.event(ToolCallDelta(0, arguments="}"))
    assert (caught.value.kind, caught.value.status) == ("upstream_error", 502)
