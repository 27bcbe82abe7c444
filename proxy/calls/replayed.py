"""A call that gets the reply of a recorded one: it is recorded and answered without an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import orjson
from msgspec import structs

from bridle.proxy.dialects.dialect import Dialect, Native
from bridle.proxy.dialects.wording import ReplyWords
from bridle.proxy.engines.reply import ReplyDecoder
from bridle.proxy.http.client import Client
from bridle.proxy.recording.recorder import begun_call
from bridle.proxy.recording.replayed import ReplayedRecording
from bridle.proxy.replay.recorded import RecordedCall, renamed_replies
from bridle.proxy.replay.replay import Step
from bridle.proxy.services import Services
from bridle.proxy.session.registry import store_unavailable
from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import Link
from bridle.proxy.wire.canonical import (
    Event,
    Minted,
    Request,
    Started,
    ToolCallDelta,
    Usage,
)
from bridle.proxy.wire.fold import Fold
from bridle.proxy.wire.sse import SseParser
from bridle.store.call import EndedFacts
from bridle.store.clock import Stopwatch
from bridle.store.errors import StoreUnavailable
from bridle.store.records import CallStatus, Message


async def serve_replayed(
    services: Services,
    client: Client,
    dialect: Dialect,
    body: bytes,
    session: Session,
    link: Link,
    step: Step,
) -> None:
    """Record the call and send the recorded reply, with the ids of the new call.

    Raise :class:`bridle.proxy.wire.canonical.ApiError` if the store takes no record.
    """
    recorded, request, watch = step.replayed, step.request, Stopwatch()
    replay = await services.replays.of(session)
    assert recorded is not None, "a live call"  # noqa: S101 - a programming error
    assert replay is not None, "a session without an origin"  # noqa: S101
    begun = replace(
        begun_call(session.id, request, body, client.headers, watch.started_at, link),
        replayed_call_id=recorded.id,
    )
    replay.answered(recorded, begun.id)
    await asyncio.sleep(replay.wait(recorded, time.monotonic()))
    replies = renamed_replies(recorded, replay.names)
    minted = dialect.mint(begun.id, int(begun.started_at), request.model)
    reply = await asyncio.to_thread(replay.response, recorded)
    if dialect.native is not None:
        reply = _in_native_form(dialect.native, request, reply, recorded, step)
    elif recorded.row.stream != request.stream or _has_other_names(replies, step):
        reply = _emitted(dialect, request, minted, reply, recorded)
    recording = ReplayedRecording(begun, session, request, link, recorded, replies, watch.now)
    recording.sent(reply)
    try:
        services.recorder.open(session, begun)
        await services.recorder.commit(recording, _outcome(recorded, step))
    except StoreUnavailable as error:
        raise store_unavailable() from error
    headers = ((b"x-request-id", begun.id.encode()), (b"x-bridle-session", session.id.encode()))
    if not request.stream:
        await client.respond(200, reply, headers=headers)
        return
    client.start_stream(dialect.emitter(request, minted).content_type, headers)
    await client.finish(reply)


def _has_other_names(replies: Sequence[Message], step: Step) -> bool:
    """Return whether a tool call must have other arguments than the recorded ones."""
    return step.aliases is not None and any(
        step.aliases.arguments(tool.arguments) != tool.arguments
        for reply in replies
        for tool in reply.tool_calls
    )


def _in_native_form(
    native: Native, request: Request, reply: bytes, recorded: RecordedCall, step: Step
) -> bytes:
    """Return a recorded reply as the request asks for it, streamed or whole.

    All that the upstream may demand back stays as it is: signatures, encrypted reasoning, its ids.
    """
    if recorded.row.stream != request.stream:
        reader = native.reader(request)
        if recorded.row.stream and reply.lstrip()[:1] != b"[":
            for payload in _payloads(reply):
                reader.take(payload)
        else:
            reader.whole(reply)
        whole = reader.body()
        reply = native.stream(request, whole) if request.stream else orjson.dumps(whole)
    if _has_other_names(recorded.row.replies, step) and native.change is not None:
        reply = ReplyWords(native.wording, native.change).recorded(reply)
    return reply


def _emitted(
    dialect: Dialect, request: Request, minted: Minted, reply: bytes, recorded: RecordedCall
) -> bytes:
    """Return a recorded chat or completion as the dialect writes it, by way of its events.

    These have the opaque fields of the recorded reply too.
    """
    decoder = ReplyDecoder(minted, choices=len(recorded.row.replies), detail=request.wants.logprobs)
    usage: Event = Usage(recorded.row.prompt_tokens or 0, recorded.row.sampled_tokens or 0)
    events: list[Event] = [Started(recorded.row.prompt_tokens)]
    for payload in _payloads(reply) if recorded.row.stream else [reply]:
        events += decoder.events(payload)
    events += decoder.last_events() or [usage]
    # The call's own ids are in the recorded bytes already.
    events = [
        structs.replace(event, id=event.engine_id, engine_id=None)
        if isinstance(event, ToolCallDelta) and event.engine_id is not None
        else event
        for event in events
    ]
    if request.stream:
        emitter = dialect.emitter(request, minted)
        return b"".join([emitter.begin(), *map(emitter.event, events), emitter.end()])
    fold = Fold()
    fold.take(events)
    return dialect.reply(request, minted, fold.reply())


def _payloads(stream: bytes) -> list[bytes]:
    parser = SseParser()
    payloads = [*parser.feed(stream), *parser.finish()]
    return [payload for payload in payloads if payload != b"[DONE]"]


def _outcome(recorded: RecordedCall, step: Step) -> EndedFacts:
    return EndedFacts(status=CallStatus.COMPLETE, notes=step.notes, policy=recorded.row.policy)
