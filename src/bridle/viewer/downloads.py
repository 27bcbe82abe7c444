"""The sessions of a filtered list as a file, in the formats of ``bridle export``."""

from __future__ import annotations

import os
from enum import StrEnum
from tempfile import mkstemp

from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from bridle.diagnosis.pages import session_ids
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.selection import Selection
from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter


class PageFormat(StrEnum):
    """The export formats that need only text."""

    CHAT = "chat"
    TRL = "trl"
    SHAREGPT = "sharegpt"
    ADP = "adp"
    ATIF = "atif"
    CSV = "csv"


def selection_file(reader: Reader, wanted: SessionFilter, form: PageFormat) -> FileResponse:
    """Return the file of the sessions that match, which is removed once it has been sent.

    Raise :class:`NotFound`, with the reasons, if no session is left to write.
    """
    chosen = session_ids(reader, wanted)
    if not chosen:
        raise NotFound("no session matches the filter, so there is nothing to export")
    handle, path = mkstemp(prefix="bridle-export-")
    os.close(handle)
    try:
        report = export(reader, path, form.value, Selection(sessions=tuple(chosen)))
        if not report.rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
            raise NotFound(f"nothing to export as {form}: left out {reasons}")
    except BaseException:
        os.unlink(path)
        raise
    return FileResponse(
        path,
        filename=f"sessions.{'csv' if form is PageFormat.CSV else 'jsonl'}",
        media_type="text/csv" if form is PageFormat.CSV else "application/x-ndjson",
        headers={"cache-control": "no-store"},
        background=BackgroundTask(os.unlink, path),
    )
