"""The routes of the viewer: each reads what one page shows and renders its template.

Endpoints are plain functions, which FastAPI runs in threads. A request that htmx makes gets only
the part of the page that changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bridle.reconstruct.audit import audit_loaded
from bridle.reconstruct.findings import findings_of_run, findings_of_session
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.transcript import ShownMessage, Turn, lasted, readable, shown, turns_of
from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.reading.pages import (
    SessionFilter,
    SessionOrder,
    choices,
    count_sessions,
    lines_of,
    placed_sessions,
    session_lines,
    token_account,
)
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.records import BreakReason, CallKind, CallStatus
from bridle.viewer import turns
from bridle.viewer.charts import bar, histogram
from bridle.viewer.differences import difference
from bridle.viewer.training import (
    by_name,
    charts,
    groups_of,
    outcome_bars,
    stage_lanes,
    task_changes,
)

PAGE: Final = 50
"""Lines of a list."""
TURNS: Final = 12
"""Turns that come at once."""
_FOLDER: Final = Path(__file__).parent
_POLICY: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Source:
    """What the pages are made from."""

    reader: Reader
    store: str
    """The store's name for people."""
    token_text: turns.TokenText


def token_text(tokenizer: Path | None) -> turns.TokenText:
    """The text of a token id by a model directory's tokenizer; without one, the id itself.

    Raises :class:`bridle.engine.contract.tokenizer.TokenizerNotRead`.
    """
    if tokenizer is None:
        return str
    from bridle.engine.contract.tokenizer import Tokenizer

    pieces = Tokenizer(tokenizer).vocabulary()

    def text(token: int) -> str:
        return pieces[token].decode("utf-8", "replace") if token < len(pieces) else str(token)

    return text


def viewer_app(source: Source) -> FastAPI:
    """The viewer as an application of its own."""
    app = FastAPI(title="Bridle viewer", docs_url=None, redoc_url=None, openapi_url=None)

    def provide(request: Request) -> None:
        request.state.source = source

    app.include_router(viewer_router(Depends(provide)))
    app.mount("/static", static_files(), name="static")

    @app.exception_handler(NotFound)
    @app.exception_handler(StoreUnavailable)
    @app.exception_handler(RequestValidationError)
    async def failed(request: Request, error: Exception) -> Response:
        return _failure("", source, request, error)

    return app


def static_files() -> StaticFiles:
    """Style sheet, scripts and htmx."""
    return StaticFiles(directory=_FOLDER / "static")


def _failure(root: str, source: Source, request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, NotFound) else 503
    message = str(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, message = 422, f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"
    page = _render(root, source, "error.html", request, message=message)
    page.status_code = status
    return page


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "when": lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        "seconds": lasted,
        "figure": lambda value: "–" if value is None else f"{value:,.4g}",
        "count": lambda value: "–" if value is None else f"{value:,}",
        "words": lambda value: str(value).replace("_", " "),
        "pretty": lambda value: orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(),
        "query": lambda values: urlencode({k: v for k, v in values.items() if v not in (None, "")}),
    }
    return environment


def _render(root: str, source: Source, name: str, request: Request, **values: Any) -> HTMLResponse:
    template = _templates().get_template(name)
    text = template.render(root=root, store=source.store, path=request.url.path, **values)
    headers = {"content-security-policy": _POLICY, "referrer-policy": "same-origin"}
    return HTMLResponse(text, headers=headers | {"cache-control": "no-store", "vary": "HX-Request"})


Text = Annotated[str | None, Query(max_length=512)]


def _number(value: str | None) -> float | None:
    try:
        return None if not value else float(value)
    except ValueError:
        return None


def session_filter(
    run: Text = None,
    task: Text = None,
    group: Text = None,
    harness: Text = None,
    outcome: Text = None,
    reward: Text = None,
    least: Text = None,
    most: Text = None,
    version: Text = None,
    broke: Text = None,
    kind: Text = None,
    status: Text = None,
    fate: Text = None,
    reason: Text = None,
    text: Text = None,
) -> SessionFilter:
    """The filter of a query; a field that is left empty, or is no number, sets no condition."""
    whole = _number(version)
    return SessionFilter(
        run=run or None,
        task=task or None,
        group=group or None,
        harness=harness or None,
        outcome=outcome or None,
        reward=reward or None,
        least=_number(least),
        most=_number(most),
        version=None if whole is None else int(whole),
        broke=broke or None,
        kind=kind or None,
        status=status or None,
        fate=fate or None,
        reason=reason or None,
        text=text or None,
    )


Filter = Annotated[SessionFilter, Depends(session_filter)]


def filled(wanted: SessionFilter) -> dict[str, Any]:
    """The conditions of a filter that are set, for links."""
    values = {field.name: getattr(wanted, field.name) for field in fields(wanted)}
    return {name: value for name, value in values.items() if value is not None}


def _source(request: Request) -> Source:
    return request.state.source  # type: ignore[no-any-return]


From = Annotated[Source, Depends(_source)]


def viewer_router(provide: Any, root: str = "") -> APIRouter:
    """The pages below ``root``. ``provide`` is a dependency that refuses a caller, or sets
    ``request.state.source``."""
    router = APIRouter(prefix=root, dependencies=[provide], include_in_schema=False)

    @router.get("/", name="viewer")
    def start() -> Response:
        return RedirectResponse(f"{root}/sessions")

    @router.get("/sessions")
    def sessions(
        request: Request,
        source: From,
        wanted: Filter,
        order: SessionOrder = SessionOrder.NEWEST,
        page: Annotated[int, Query(ge=1)] = 1,
    ) -> Response:
        found = session_lines(
            source.reader, wanted, order, limit=PAGE + 1, offset=PAGE * (page - 1)
        )
        part = "hx-request" in request.headers
        # To count the sessions that have a text, all messages would be read.
        total = None if wanted.text else count_sessions(source.reader, wanted)
        return _render(
            root,
            source,
            "session_list.html" if part else "sessions.html",
            request,
            lines=found[:PAGE],
            more=len(found) > PAGE,
            total=total,
            page=page,
            order=order,
            orders=list(SessionOrder),
            wanted=wanted,
            filled=filled(wanted),
            choices=None if part else choices(source.reader),
            kinds=list(CallKind),
            statuses=list(CallStatus),
            breaks=list(BreakReason),
        )

    @router.get("/sessions/{session_id}")
    def session(request: Request, source: From, session_id: str) -> Response:
        loaded = LoadedSession.load(source.reader, session_id)
        made = turns_of(loaded)
        (line,) = lines_of(source.reader, [loaded.record])
        begin = min((turn.call.started_at for turn in made), default=0.0)
        end = max((turn.call.ended_at or turn.call.started_at for turn in made), default=1.0)
        return _render(
            root,
            source,
            "session.html",
            request,
            session=loaded,
            line=line,
            turns=made,
            **_part(made, 1, TURNS),
            begin=begin,
            span=(end - begin) or 1.0,
            task=source.reader.task_of(loaded.record),
            findings=findings_of_session(source.reader, session_id),
        )

    @router.get("/sessions/{session_id}/turns")
    def some_turns(
        request: Request,
        source: From,
        session_id: str,
        first: Annotated[int, Query(ge=1)] = 1,
        count: Annotated[int, Query(ge=1, le=500)] = TURNS,
        seen: Text = None,
    ) -> Response:
        loaded = LoadedSession.load(source.reader, session_id)
        made = turns_of(loaded)
        if seen is not None and seen == _seen(made) and loaded.record.sealed_at is None:
            return Response(status_code=204)
        part = _part(made, first, count)
        return _render(root, source, "turns.html", request, session=loaded, turns=made, **part)

    def turn(source: Source, session_id: str, number: int) -> tuple[LoadedSession, CallRow]:
        loaded = LoadedSession.load(source.reader, session_id)
        if not 1 <= number <= len(loaded.calls):
            raise NotFound(f"session {session_id} has no turn {number}")
        return loaded, loaded.calls[number - 1]

    @router.get("/sessions/{session_id}/turns/{number}/tokens")
    def tokens(
        request: Request, source: From, session_id: str, number: int, observed: bool = False
    ) -> Response:
        loaded, call = turn(source, session_id, number)
        strip = turns.token_strip(loaded, call, source.token_text, observed=observed)
        data = orjson.dumps(strip).decode().replace("<", "\\u003c")
        values = {"data": data, "strip": strip, "observed": observed, "number": number}
        return _render(root, source, "tokens.html", request, session=loaded, **values)

    @router.get("/sessions/{session_id}/turns/{number}/{part}.json")
    def body(source: From, session_id: str, number: int, part: str) -> Response:
        loaded, call = turn(source, session_id, number)
        if part not in ("request", "response"):
            raise NotFound(f"a turn has a request and a response, no {part}")
        found = loaded.request(call) if part == "request" else loaded.response(call)
        text = readable((found or b"(nothing was sent)").decode("utf-8", "replace"))
        return Response(text, media_type="text/plain; charset=utf-8")

    @router.get("/sessions/{session_id}/turns/{number}/diff")
    def diff(request: Request, source: From, session_id: str, number: int) -> Response:
        loaded, call = turn(source, session_id, number)
        found = difference(loaded, call, source.token_text)
        return _render(
            root, source, "diff.html", request, found=found, ids_only=source.token_text is str
        )

    @router.get("/sessions/{session_id}/tree")
    def tree(request: Request, source: From, session_id: str) -> Response:
        loaded = LoadedSession.load(source.reader, session_id)
        rows = turns.as_tree(turns_of(loaded))
        return _render(root, source, "tree.html", request, session=loaded, rows=rows)

    @router.get("/sessions/{session_id}/audit")
    def session_audit(request: Request, source: From, session_id: str) -> Response:
        loaded = LoadedSession.load(source.reader, session_id)
        found = audit_loaded(loaded)
        made = turns_of(loaded)
        return _render(
            root, source, "session_audit.html", request, session=loaded, audited=found, turns=made
        )

    @router.get("/groups")
    def groups(
        request: Request, source: From, wanted: Filter, page: Annotated[int, Query(ge=1)] = 1
    ) -> Response:
        found = groups_of(placed_sessions(source.reader, wanted))
        start = PAGE * (page - 1)
        return _render(
            root,
            source,
            "groups.html",
            request,
            groups=found[start : start + PAGE],
            total=len(found),
            more=len(found) > start + PAGE,
            page=page,
            filled=filled(wanted),
            histogram=histogram([reward for group in found for reward in group.rewards]),
            bars=outcome_bars(found),
        )

    @router.get("/group")
    def group(
        request: Request, source: From, id: Annotated[str, Query(max_length=512)]
    ) -> Response:
        placed = placed_sessions(source.reader, SessionFilter(group=id))
        if not placed:
            raise NotFound(f"no session has the group {id}")
        loaded = list(
            LoadedSession.stream(
                source.reader, [source.reader.session(each.id) for each in placed[:PAGE]]
            )
        )
        lines = lines_of(source.reader, [each.record for each in loaded])
        answers = [_last_reply(each) for each in loaded]
        return _render(
            root,
            source,
            "group.html",
            request,
            group=groups_of(placed)[0],
            columns=list(zip(lines, answers, strict=True)),
        )

    @router.get("/runs")
    def runs(request: Request, source: From) -> Response:
        known = source.reader.runs()[::-1]
        return _render(root, source, "runs.html", request, runs=known)

    @router.get("/runs/{run_id}")
    def run(request: Request, source: From, run_id: str, compare: Text = None) -> Response:
        reader, record = source.reader, source.reader.run(run_id)
        series = {run_id: by_name(reader.metrics(run_id))}
        if compare:
            series[reader.run(compare).id] = by_name(reader.metrics(compare))
        wanted = SessionFilter(run=run_id)
        found = groups_of(placed_sessions(reader, wanted))
        account = token_account(reader, wanted)
        stages, lanes = stage_lanes(series[run_id])
        return _render(
            root,
            source,
            "run.html",
            request,
            run=record,
            compare=compare or None,
            others=[other for other in reader.runs()[::-1] if other.id != run_id],
            charts=charts(series),
            bars=outcome_bars(found),
            groups=found,
            account=account,
            fates=_fate_bars(account.fates),
            changes=task_changes(found)[:PAGE],
            stages=stages,
            lanes=lanes[-40:],
            policies=reader.policies(run_id)[::-1][:PAGE],
        )

    @router.get("/runs/{run_id}/findings")
    def run_findings(request: Request, source: From, run_id: str) -> Response:
        found = findings_of_run(source.reader, run_id)
        return _render(root, source, "findings.html", request, findings=found)

    @router.get("/audit")
    def audit(request: Request, source: From, wanted: Filter) -> Response:
        account = token_account(source.reader, wanted)
        return _render(
            root,
            source,
            "audit.html",
            request,
            account=account,
            fates=_fate_bars(account.fates),
            wanted=wanted,
            filled=filled(wanted),
            runs=source.reader.runs()[::-1],
        )

    return router


def _fate_bars(fates: Mapping[tuple[str, str], int]) -> Any:
    order = {"trained": 0, "masked": 1, "dropped": 2}
    ordered = sorted(fates.items(), key=lambda item: (order[item[0][0]], -item[1]))
    named = {f"{fate}: {reason}" if reason else fate: tokens for (fate, reason), tokens in ordered}
    return list(zip([key for key, _ in ordered], bar(named), strict=True))


def _part(made: Sequence[Turn], first: int, count: int) -> dict[str, Any]:
    """Turns from ``first`` on: those that stay as they are, and at the end of the session those
    from the first running one on, which a running session's page asks for again."""
    end = first - 1 + count
    settled = next((t.number - 1 for t in made[first - 1 :] if t.running), len(made))
    last = end >= len(made)
    return {
        "shown": made[first - 1 : min(end, settled) if last else end],
        "unsettled": made[max(settled, first - 1) :] if last else [],
        "next_turn": None if last else end + 1,
        "live_from": max(settled, first - 1) + 1,
        "seen": _seen(made),
    }


def _seen(made: Sequence[Turn]) -> str:
    """Differs when a turn has begun or ended."""
    return f"{len(made)}.{sum(turn.running for turn in made)}"


def _last_reply(session: LoadedSession) -> ShownMessage | None:
    for call in reversed(session.calls):
        if call.replies and call.kind is not CallKind.SIDE:
            return shown(call.replies[0], 0)
    return None
