"""The data card of an exported file: its contents, their origin, and its hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from bridle.reconstruct.exports.selection import ExportReport, Selection
from bridle.reconstruct.samples.builders import BUILDER_VERSION


def write_card(report: ExportReport, form: str, selection: Selection, made_at: float) -> Path:
    """Write ``FILE.card.json`` for an exported file and return its path."""
    path = report.path.with_name(report.path.name + ".card.json")
    card = data_card(report, form, selection, made_at)
    path.write_bytes(orjson.dumps(card, option=orjson.OPT_INDENT_2))
    return path


def data_card(
    report: ExportReport, form: str, selection: Selection, made_at: float
) -> dict[str, Any]:
    """Return the card as JSON-ready data; ``made_at`` is in seconds since the epoch.

    ``sessions_sha256`` is the hash of the sorted ids of the sessions, one per line, so that cards
    of the same sessions have the same value. The card names no store, whose URL may hold a
    password.
    """
    return {
        "file": report.path.name,
        "format": form,
        "sha256": _sha256(report.path),
        "bytes": report.path.stat().st_size,
        "made_at": made_at,
        "counts": {
            "rows": report.rows,
            "sessions": report.sessions,
            "trainable_tokens": report.tokens,
            "left_out": report.left_out,
        },
        "tokens": {"captured": sum(report.account.values()), **report.account},
        "provenance": {
            "selection": selection.as_data(),
            "builder_version": BUILDER_VERSION,
            "sessions_sha256": _digest(report.session_ids),
            **{name: dict(counter.most_common()) for name, counter in report.taken.items()},
        },
        "rewards": {name: _spread(values) for name, values in report.rewards.items()},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(values) / len(values)
    return {"count": len(values), "mean": mean, "min": min(values), "max": max(values)}


def _digest(session_ids: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(session_ids)).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
