"""Records of calls as rows of their tables; JSON columns as text, ready for the driver."""

from __future__ import annotations

from typing import Any, Final

from store.bodies import BodyRow
from store.columns import digest_bytes
from store.integrity import contradiction, has_ids
from store.packing import dump_json, pack_ids, pack_json, pack_logprobs
from store.records import CallBegun, CallEnded, CallKind, CallStatus, Span, SpanKind
from store.stored import span_checksum

_IDS_ABSENT: Final = "no_token_ids"
"""Note on a call whose upstream told no ids: there is nothing to check or train."""

_NOTHING: Final = pack_json({})

_NOT_YET: Final[dict[str, Any]] = {
    "kind": CallKind.UNKNOWN.value,
    "role": None,
    "status": CallStatus.OPEN.value,
    "reason": None,
    "break_reason": None,
    "model_served": None,
    "prompt_span_id": None,
    "prompt_tokens": None,
    "sampled_tokens": None,
    "version_start": None,
    "version_end": None,
    "finish_reason": None,
    "response_body_id": None,
    "sampling": "{}",
    "usage": "{}",
    "message": _NOTHING,
    "conversation": _NOTHING,
    "error": "{}",
    "notes": "[]",
    "first_token_at": None,
    "ended_at": None,
}
"""What a call's end fills in, while it runs."""

_BY_HAND: Final[dict[str, Any]] = {"kind_set": None, "role_set": None, "kind_by": None}
"""What people may say of a call later."""

END_COLUMNS: Final = tuple(_NOT_YET)


def begun_row(begun: CallBegun, writer_id: str, request_body_id: str) -> dict[str, Any]:
    """All columns of ``calls`` for a call that runs."""
    return {
        "id": begun.id,
        "session_id": begun.session_id,
        "writer_id": writer_id,
        "dialect": begun.dialect,
        "stream": begun.stream,
        "parent_call_id": begun.parent_call_id,
        "lineage_rule": begun.lineage_rule,
        "model_requested": begun.model_requested,
        "request_body_id": digest_bytes(request_body_id),
        "headers": _json(begun.headers),
        "started_at": begun.started_at,
        **_BY_HAND,
        **_NOT_YET,
    }


def ended_row(
    ended: CallEnded,
    prompt_span_id: str | None,
    response_body_id: str | None,
    addition: bytes = b"",
) -> dict[str, Any]:
    """``END_COLUMNS``; a reply that contradicts itself is quarantined here, whoever wrote it.

    ``addition`` is what the stored row of the call's request adds (``BodyRow.addition``).
    """
    status, reason = ended.status, ended.reason
    notes = [{"name": note.name, "detail": note.detail} for note in ended.notes]
    if status in (CallStatus.COMPLETE, CallStatus.PARTIAL):
        if (found := contradiction(ended)) is not None:
            status, reason = CallStatus.QUARANTINED, found
        elif (
            ended.kind is not CallKind.COUNT
            and not has_ids(ended)
            and not any(note["name"] == _IDS_ABSENT for note in notes)
        ):
            notes.append({"name": _IDS_ABSENT, "detail": ""})
    prompt = ended.prompt_token_ids
    versions = [run.version for choice in ended.choices for run in choice.versions]
    return {
        "kind": ended.kind.value,
        "role": ended.role,
        "status": status.value,
        "reason": reason,
        "break_reason": None if ended.break_reason is None else ended.break_reason.value,
        "model_served": ended.model_served,
        "prompt_span_id": prompt_span_id,
        "prompt_tokens": None if prompt is None else len(prompt),
        "sampled_tokens": sum(len(choice.token_ids) for choice in ended.choices),
        "version_start": min(versions, default=None),
        "version_end": max(versions, default=None),
        "finish_reason": ended.choices[0].finish_reason if ended.choices else None,
        "response_body_id": digest_bytes(response_body_id),
        "sampling": _json(ended.sampling),
        "usage": _json(ended.usage),
        "message": pack_json(ended.message) if ended.message else _NOTHING,
        "conversation": conversation_value(ended, addition),
        "error": _json(ended.error),
        "notes": _json(notes),
        "first_token_at": ended.first_token_at,
        "ended_at": ended.ended_at,
    }


def conversation_value(ended: CallEnded, addition: bytes = b"") -> bytes:
    """``calls.conversation``, its text compressed with ``addition`` at hand."""
    return pack_json(ended.conversation, addition) if ended.conversation else _NOTHING


def span_row(span: Span, ended: CallEnded) -> dict[str, Any]:
    """All columns of ``spans``."""
    sampled = span.kind is SpanKind.SAMPLED
    choice = int(span.id.rsplit(".s", 1)[1]) if sampled else None
    return {
        "id": span.id,
        "session_id": span.session_id,
        "call_id": span.call_id,
        "parent_id": span.parent_id,
        "start": span.start,
        "length": len(span.token_ids),
        "kind": span.kind.value,
        "choice": choice,
        "finish_reason": None if choice is None else ended.choices[choice].finish_reason,
        "token_ids": pack_ids(span.token_ids),
        "logprobs": None if span.logprobs is None else pack_logprobs(span.logprobs),
        "versions": _json([(run.start, run.version) for run in span.versions]),
        "checksum": span_checksum(span),
    }


def body_row(body: BodyRow) -> dict[str, Any]:
    """All columns of ``bodies``."""
    return {
        "id": digest_bytes(body.id),
        "base_id": digest_bytes(body.base_id),
        "prefix": body.prefix,
        "suffix": body.suffix,
        "size": body.size,
        "depth": body.depth,
        "data": body.data,
    }


def _json(value: object) -> str:
    return dump_json(value).decode()
