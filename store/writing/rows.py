"""Records of calls as rows of their tables; JSON columns as text, ready for the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bridle.store.encoding.bodies import Body, BodyRow, Splice
from bridle.store.encoding.packing import RAW, dump_json, pack, pack_ids, pack_logprobs
from bridle.store.records import CallBegun, CallEnded, CallKind, CallStatus, Span
from bridle.store.schema.columns import digest_bytes
from bridle.store.writing.cache import Template
from bridle.store.writing.integrity import contradiction, has_ids, span_checksum

_IDS_ABSENT: Final = "no_token_ids"
"""Note on a call whose upstream told no ids: there is nothing to check or train."""

_AS_TEMPLATE: Final = "null"

OBSERVED: Final = -1
"""``spans.choice`` of the tokens that a call observed."""

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
    "headers": "{}",
    "sampling": "{}",
    "usage": "{}",
    "template_id": None,
    "texts": None,
    "error": "{}",
    "notes": "[]",
    "first_token_at": None,
    "ended_at": None,
}
"""What a call's end fills in, while it runs."""

_BY_HAND: Final[dict[str, Any]] = {"kind_set": None, "role_set": None, "kind_by": None}
"""What people may say of a call later."""

END_COLUMNS: Final = tuple(_NOT_YET)


def begun_row(
    begun: CallBegun, writer_id: str, request: Body, base_call_id: str | None
) -> dict[str, Any]:
    """All columns of ``calls`` for a call that runs; ``base_call_id`` is whose request its own is
    a splice of."""
    return {
        "id": begun.id,
        "session_id": begun.session_id,
        "writer_id": writer_id,
        "dialect": begun.dialect,
        "stream": begun.stream,
        "parent_call_id": begun.parent_call_id,
        "lineage_rule": begun.lineage_rule,
        "model_requested": begun.model_requested,
        "request_body_id": digest_bytes(request.id),
        "request_base_id": None if base_call_id == begun.parent_call_id else base_call_id,
        "request_depth": request.depth,
        "started_at": begun.started_at,
        **_BY_HAND,
        **_NOT_YET,
        "headers": _json(begun.headers),
    }


def ended_row(
    ended: CallEnded,
    prompt_span_id: str | None,
    response_body_id: str | None,
    fields: Mapping[str, Any],
    template: Template | None,
    texts: bytes,
) -> dict[str, Any]:
    """``END_COLUMNS``; a reply that contradicts itself is quarantined here, whoever wrote it, if it
    has not been compared before."""
    status, reason = ended.status, ended.reason
    notes = [{"name": note.name, "detail": note.detail} for note in ended.notes]
    if status in (CallStatus.COMPLETE, CallStatus.PARTIAL):
        if not ended.compared and (found := contradiction(ended)) is not None:
            status, reason = CallStatus.QUARANTINED, found
        elif (
            ended.kind is not CallKind.COUNT
            and not has_ids(ended)
            and not any(note["name"] == _IDS_ABSENT for note in notes)
        ):
            notes.append({"name": _IDS_ABSENT, "detail": ""})
    prompt = None if ended.prompt_token_ids is None else len(ended.prompt_token_ids)
    sampled = sum(len(choice.token_ids) for choice in ended.choices)
    versions = [run.version for choice in ended.choices for run in choice.versions]
    return {
        "kind": ended.kind.value,
        "role": ended.role,
        "status": status.value,
        "reason": reason,
        "break_reason": None if ended.break_reason is None else ended.break_reason.value,
        "model_served": ended.model_served,
        "prompt_span_id": prompt_span_id,
        "prompt_tokens": prompt,
        "sampled_tokens": sampled,
        "version_start": min(versions, default=None),
        "version_end": max(versions, default=None),
        "finish_reason": ended.choices[0].finish_reason if ended.choices else None,
        "response_body_id": digest_bytes(response_body_id),
        **_lean(fields, None if template is None else template.fields, prompt, sampled),
        "template_id": None if template is None else template.id,
        "texts": texts,
        "error": _json(ended.error) if ended.error else "{}",
        "notes": _json(notes) if notes else "[]",
        "first_token_at": ended.first_token_at,
        "ended_at": ended.ended_at,
    }


def leaning_fields(headers: Mapping[str, str], ended: CallEnded) -> dict[str, Mapping[str, Any]]:
    """The columns that are not stored where they are a template's."""
    return {"headers": headers, "sampling": ended.sampling, "usage": ended.usage}


def expected_usage(
    usage: Mapping[str, Any], prompt_tokens: int | None, sampled_tokens: int | None
) -> dict[str, Any]:
    """A call's usage if all but its own numbers of tokens is the template's."""
    return {**usage, "prompt_tokens": prompt_tokens, "completion_tokens": sampled_tokens}


def _lean(
    fields: Mapping[str, Any], template: Mapping[str, Any] | None, prompt: int | None, sampled: int
) -> dict[str, str]:
    """JSON of each field; ``null`` for the template's, of usage but for the numbers of tokens."""
    told = {name: _json(value) for name, value in fields.items()}
    if template is None:
        return told
    expected = {**template, "usage": expected_usage(template["usage"], prompt, sampled)}
    # As JSON, for in Python 1, 1.0 and true are the same.
    return {
        name: _AS_TEMPLATE if value == _json(expected[name]) else value
        for name, value in told.items()
    }


def span_row(span: Span, ended: CallEnded) -> dict[str, Any]:
    """All columns of ``spans``."""
    call_id, choice = span_place(span.id)
    versions = [(run.start, run.version) for run in span.versions]
    parent_call, parent_choice = (
        (None, None) if span.parent_id is None else span_place(span.parent_id)
    )
    return {
        "call_id": call_id,
        "choice": choice,
        "parent_call_id": None if parent_call == call_id else parent_call,
        "parent_choice": parent_choice,
        "start": span.start,
        "length": len(span.token_ids),
        "finish_reason": None if choice == OBSERVED else ended.choices[choice].finish_reason,
        "token_ids": pack_ids(span.token_ids),
        "logprobs": None if span.logprobs is None else pack_logprobs(span.logprobs),
        "versions": _json(versions) if versions else "[]",
        "checksum": span_checksum(span),
    }


def span_id(call_id: str, choice: int) -> str:
    """``{call_id}.o`` or ``{call_id}.s{choice}``."""
    return f"{call_id}.o" if choice == OBSERVED else f"{call_id}.s{choice}"


def span_place(identifier: str) -> tuple[str, int]:
    """The call and the choice of a :func:`span_id`."""
    call_id, _, part = identifier.rpartition(".")
    return call_id, OBSERVED if part == "o" else int(part[1:])


def template_row(session_id: str, kind: str, template: Template) -> dict[str, Any]:
    """All columns of ``templates``."""
    vocabulary = template.context.vocabulary
    return {
        "session_id": session_id,
        "id": template.id,
        "kind": kind,
        "vocabulary_id": None if vocabulary is None else digest_bytes(vocabulary.id),
        "fields": _json(template.fields),
        "data": pack(template.context.wrapping),
    }


def running_row(call_id: str, request: Splice) -> dict[str, Any]:
    """All columns of ``running``."""
    packed = request.data
    if packed[0] == RAW:
        packed = pack(packed[1:])
    return {
        "call_id": call_id,
        "prefix": request.prefix,
        "suffix": request.suffix,
        "data": packed,
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
