"""A call that gets the reply of a recorded one: it is recorded and answered without an engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from bridle.proxy.dialects.dialect import Dialect
from bridle.proxy.http.client import Client
from bridle.proxy.recording.recorder import begun_call
from bridle.proxy.recording.replayed import ReplayedRecording
from bridle.proxy.replay.recorded import RecordedCall, renamed_replies
from bridle.proxy.replay.replay import Step
from bridle.proxy.services import Services
from bridle.proxy.session.registry import store_unavailable
from bridle.proxy.session.session import Session
from bridle.proxy.session.turn import Link
from bridle.store.call import EndedFacts
from bridle.store.clock import Stopwatch
from bridle.store.errors import StoreUnavailable
from bridle.store.records import CallStatus


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
    reply = await asyncio.to_thread(replay.response, recorded)
    replies = renamed_replies(recorded, replay.names)
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
    minted = dialect.mint(begun.id, int(begun.started_at), request.model)
    client.start_stream(dialect.emitter(request, minted).content_type, headers)
    await client.finish(reply)


def _outcome(recorded: RecordedCall, step: Step) -> EndedFacts:
    return EndedFacts(status=CallStatus.COMPLETE, notes=step.notes, policy=recorded.row.policy)
