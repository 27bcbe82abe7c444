"""The proxy's log: one line per event, as text for a person or as JSON for a collector.

A line has the event's name and its fields, among them the ids of the session and the call. Bodies,
headers and keys are never fields.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Final, Literal

from bridle.printable import printable
from bridle.proxy.settings import LogLevel
from bridle.store.call import CallBegun, CallEnded
from bridle.store.records import CallKind

Format = Literal["text", "json"]

log: Final = logging.getLogger("bridle.proxy")
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def configure(form: Format, level: LogLevel) -> None:
    """Write this process's log to standard error, in ``form``, from ``level`` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in ("bridle", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    log.setLevel(level.upper())


class TextLines(logging.Formatter):
    """``time level event field=value …``, with no line break or control character of a field."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()} {fields}".rstrip()
        return printable(line, one_line=True) + (
            f"\n{printable(_trace(record))}" if record.exc_info else ""
        )


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object per line.

    The object has ``at``, ``level``, ``event``, the fields, and an error's ``trace``.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": _time(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["trace"] = _trace(record)
        return json.dumps(line, default=str, ensure_ascii=False)


def log_call(begun: CallBegun, ended: CallEnded) -> None:
    """Log a call whose end is committed."""
    first = ended.first_token_at
    fields: dict[str, Any] = {
        "session": ended.session_id,
        "call": ended.id,
        "parent": begun.parent_call_id,
        "dialect": begun.dialect,
        "status": ended.status.value,
        "reason": ended.reason,
        "kind": None if ended.kind is CallKind.UNKNOWN else ended.kind.value,
        "model": ended.model_served,
        "prompt_tokens": ended.usage.get("prompt_tokens"),
        "sampled_tokens": sum(len(choice.token_ids) for choice in ended.choices),
        "first_token_ms": None if first is None else _ms(first - begun.started_at),
        "ms": _ms(ended.ended_at - begun.started_at),
        "notes": [note.name for note in ended.notes] or None,
    }
    present = {name: value for name, value in fields.items() if value is not None}
    log.info("call_ended", extra=present)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _trace(record: logging.LogRecord) -> str:
    return "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
