"""A call that gets the reply of a recorded one: it is recorded and answered without an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.dialects.wording import ReplyWords
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
    ChoiceReply,
    Event,
    Finished,
    Minted,
    ReasoningDelta,
    Reply,
    Request,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)
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
    renames = _has_other_names(replies, step)
    if recorded.row.stream != request.stream or (renames and dialect.native is None):
        reply = _emitted(dialect, request, minted, replies, recorded)
    else:
        reply = await asyncio.to_thread(replay.response, recorded)
        if renames and dialect.native is not None:
            reply = ReplyWords(dialect.native.wording, replay.aliases.arguments).recorded(reply)
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


def _emitted(
    dialect: Dialect,
    request: Request,
    minted: Minted,
    replies: Sequence[Message],
    recorded: RecordedCall,
) -> bytes:
    """Return the recorded replies as the dialect writes them, by way of its events."""
    usage = Usage(recorded.row.prompt_tokens or 0, recorded.row.sampled_tokens or 0)
    events: list[Event] = [Started(usage.prompt_tokens)]
    for choice, reply in enumerate(replies):
        if reply.reasoning:
            events.append(ReasoningDelta(reply.reasoning, choice))
        if isinstance(reply.content, str) and reply.content:
            events.append(TextDelta(reply.content, choice))
        events += [
            ToolCallDelta(place, tool.id, tool.name, tool.arguments, choice)
            for place, tool in enumerate(reply.tool_calls)
        ]
        events.append(Finished("tool_calls" if reply.tool_calls else "stop", choice))
    events.append(usage)
    if request.stream:
        emitter = dialect.emitter(request, minted)
        written = [emitter.begin(), *map(emitter.event, events), emitter.end()]
        return b"".join(written)
    choices = [
        ChoiceReply(
            text=reply.content if isinstance(reply.content, str) else "",
            reasoning=reply.reasoning or "",
            tool_calls=reply.tool_calls,
            finish_reason="tool_calls" if reply.tool_calls else "stop",
        )
        for reply in replies
    ]
    return dialect.reply(request, minted, Reply(choices, usage))


def _outcome(recorded: RecordedCall, step: Step) -> EndedFacts:
    return EndedFacts(status=CallStatus.COMPLETE, notes=step.notes, policy=recorded.row.policy)
