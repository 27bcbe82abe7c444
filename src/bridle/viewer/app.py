"""The routes of the viewer. Each route reads the data of one page and renders its template.

Endpoints are plain functions, which FastAPI runs in threads. A request from htmx gets only the part
of the page that changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from bridle.diagnosis.findings import findings_of_run, findings_of_session
from bridle.diagnosis.pages import (
    MOST_OF_RUN,
    MOST_PLACED,
    Placed,
    SessionNumber,
    SessionOrder,
    choices,
    count_sessions,
    is_ascending,
    lines_of,
    placed_sessions,
    session_lines,
)
from bridle.diagnosis.transcript import ShownMessage, Turn, readable, shown, turns_of
from bridle.diagnosis.values import LOST, branches_of
from bridle.errors import UsageError
from bridle.reconstruct.accounts import account_lines, token_account
from bridle.reconstruct.audit import audit_loaded
from bridle.reconstruct.rewards import CountedRewards
from bridle.reconstruct.session import LoadedSession
from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.reading.queries import CallRow, Reader
from bridle.store.reading.run_states import run_state
from bridle.store.reading.search import TAIL
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import BreakReason, CallKind, CallStatus, RunRecord
from bridle.store.schema.accounts import Fate
from bridle.viewer import turns
from bridle.viewer.charts import bar, histogram
from bridle.viewer.differences import difference
from bridle.viewer.downloads import PageFormat, selection_file
from bridle.viewer.filters import Filter, Text, filled
from bridle.viewer.lanes import PHASES, lanes_of
from bridle.viewer.rendering import FOLDER, Source, failure, render, token_numbers
from bridle.viewer.scoring import scored
from bridle.viewer.training import (
    by_name,
    charts,
    groups_of,
    outcome_bars,
    stage_lanes,
    task_changes,
)

PAGE: Final = 50
"""The number of lines on a page of a list."""
LANES: Final = 64
"""The number of a run's sessions that are drawn over time."""
COUNTED_TOKENS: Final = 10_000
"""Maximum number of sampled tokens without an account in the store that a page counts itself."""
TURNS: Final = 12
"""The number of turns that are sent at once."""
PART: Final = 500
"""Maximum number of turns that a request may ask for."""


PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]


def viewer_app(source: Source) -> FastAPI:
    """Return the pages of one store as an application, for everyone who reaches it."""

    async def provide(_: Request) -> Source:
        return source

    return pages_app(provide, source.store)


def pages_app(
    provide: Callable[[Request], Awaitable[Source]], store: str, root: str = ""
) -> FastAPI:
    """Return the pages below ``root`` as an application.

    ``provide`` returns the source from which a request is answered, or raises. ``store`` is the
    name on pages of requests that got no source.
    """
    app = bare_app(store, root)

    async def provided(request: Request) -> None:
        request.state.source = await provide(request)

    app.include_router(pages, prefix=root, dependencies=[Depends(provided)])
    return app


def bare_app(store: str, root: str) -> FastAPI:
    """Return an application below ``root`` without pages: static files, and pages of errors."""
    app = FastAPI(title="Bridle viewer", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.root, app.state.store = root, store
    app.add_middleware(HeadAsGet)
    app.mount(f"{root}/static", static_files(), name="static")

    @app.exception_handler(HTTPException)
    @app.exception_handler(NotFound)
    @app.exception_handler(UsageError)
    @app.exception_handler(StoreUnavailable)
    @app.exception_handler(RequestValidationError)
    async def failed(request: Request, error: Exception) -> Response:
        return failure(request, error)

    return app


class HeadAsGet:
    """Answer ``HEAD`` like ``GET``. The server leaves out the body, by its own scope's method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def static_files() -> StaticFiles:
    """Return the style sheet, the scripts and htmx."""
    return StaticFiles(directory=FOLDER / "static")


def _source(request: Request) -> Source:
    return request.state.source  # type: ignore[no-any-return]


From = Annotated[Source, Depends(_source)]


pages = APIRouter(include_in_schema=False)


@pages.get("/", name="viewer")
def start(request: Request) -> Response:
    return RedirectResponse(f"{request.app.state.root}/sessions")


@pages.get("/sessions")
def sessions(
    request: Request,
    source: From,
    wanted: Filter,
    order: SessionOrder = SessionOrder.NEWEST,
    reverse: bool = False,
    page: PageNumber = 1,
) -> Response:
    found = session_lines(
        source.reader,
        wanted,
        order,
        number=number_of(source.reader),
        limit=PAGE + 1,
        offset=PAGE * (page - 1),
        reverse=reverse,
    )
    part = "hx-request" in request.headers
    # To count the sessions that have a text, all messages would be read.
    total = None if wanted.text else count_sessions(source.reader, wanted)
    return render(
        "session_list.html" if part else "sessions.html",
        request,
        lines=found[:PAGE],
        more=len(found) > PAGE,
        total=total,
        page=page,
        order=order,
        reverse="true" if reverse else None,
        sorted="ascending" if is_ascending(order, reverse=reverse) else "descending",
        most=MOST_PLACED if order is SessionOrder.REWARD else None,
        tail=TAIL if wanted.text else None,
        orders=list(SessionOrder),
        wanted=wanted,
        filled=filled(wanted),
        choices=None if part else choices(source.reader),
        kinds=list(CallKind),
        statuses=list(CallStatus),
        breaks=list(BreakReason),
        formats=list(PageFormat),
    )


@pages.get("/export")
def export(
    source: From,
    wanted: Filter,
    form: Annotated[PageFormat, Query(alias="format")] = PageFormat.CHAT,
) -> Response:
    return selection_file(source.reader, wanted, form)


@pages.get("/sessions/{session_id}")
def session(request: Request, source: From, session_id: str) -> Response:
    loaded = source.load(source.reader, session_id)
    made = turns_of(loaded)
    number = number_of(source.reader)
    (line,) = lines_of(source.reader, [loaded.record], number)
    begin = min((turn.call.started_at for turn in made), default=0.0)
    end = max((turn.call.ended_at or turn.call.started_at for turn in made), default=1.0)
    return render(
        "session.html",
        request,
        session=loaded,
        title=line.title,
        line=line,
        turns=made,
        **_part(made, 1, TURNS),
        begin=begin,
        span=(end - begin) or 1.0,
        task=source.reader.task_of(loaded.record),
        findings=findings_of_session(source.reader, session_id),
        form=source.form,
        branches=branches_of(source.reader, session_id, loaded.calls, number),
        lost=next((one for one in loaded.all_rewards if one.name == LOST), None),
    )


@pages.post("/sessions/{session_id}/rewards")
async def score(request: Request, source: From, session_id: str) -> Response:
    form = source.form
    if form is None or form.record is None:
        raise HTTPException(405, "these pages record nothing", {"allow": "GET"})
    return await scored(request, session_id, form.token, form.record)


@pages.get("/sessions/{session_id}/turns")
def some_turns(
    request: Request,
    source: From,
    session_id: str,
    first: Annotated[int, Query(ge=1)] = 1,
    count: Annotated[int, Query(ge=1, le=PART)] = TURNS,
    seen: Text = None,
) -> Response:
    loaded = source.load(source.reader, session_id)
    made = turns_of(loaded)
    if seen is not None and seen == _seen(made) and loaded.record.sealed_at is None:
        return Response(status_code=204)
    part = _part(made, first, count)
    return render("turns.html", request, session=loaded, turns=made, **part)


def _turn(source: Source, session_id: str, number: int) -> tuple[LoadedSession, CallRow]:
    loaded = source.load(source.reader, session_id)
    if not 1 <= number <= len(loaded.calls):
        raise NotFound(f"session {session_id} has no turn {number}")
    return loaded, loaded.calls[number - 1]


@pages.get("/sessions/{session_id}/turns/{number}/tokens")
def tokens(
    request: Request, source: From, session_id: str, number: int, observed: bool = False
) -> Response:
    loaded, call = _turn(source, session_id, number)
    texts = source.texts(loaded.record)
    strip = turns.token_strip(loaded, call, texts, observed=observed)
    values = {"strip": strip, "observed": observed, "number": number}
    return render("tokens.html", request, session=loaded, **values)


@pages.get("/sessions/{session_id}/turns/{number}/{part}.json")
def body(source: From, session_id: str, number: int, part: str) -> Response:
    loaded, call = _turn(source, session_id, number)
    if part not in ("request", "response"):
        raise NotFound(f"a turn has a request and a response, no {part}")
    found = loaded.request(call) if part == "request" else loaded.response(call)
    text = readable((found or b"(nothing was sent)").decode("utf-8", "replace"))
    return Response(text, media_type="text/plain; charset=utf-8")


@pages.get("/sessions/{session_id}/turns/{number}/diff")
def diff(request: Request, source: From, session_id: str, number: int) -> Response:
    loaded, call = _turn(source, session_id, number)
    texts = source.texts(loaded.record)
    found = difference(loaded, call, texts)
    return render("diff.html", request, found=found, ids_only=texts is token_numbers)


@pages.get("/sessions/{session_id}/tree")
def tree(request: Request, source: From, session_id: str) -> Response:
    loaded = source.load(source.reader, session_id)
    rows = turns.as_tree(turns_of(loaded))
    return render("tree.html", request, session=loaded, rows=rows, title=_title(source, loaded))


@pages.get("/sessions/{session_id}/audit")
def session_audit(request: Request, source: From, session_id: str) -> Response:
    loaded = source.load(source.reader, session_id)
    found = audit_loaded(loaded)
    made = turns_of(loaded)
    return render(
        "session_audit.html",
        request,
        session=loaded,
        title=_title(source, loaded),
        audited=found,
        lines=account_lines(found.fates),
        turns=made,
    )


def _title(source: Source, session: LoadedSession) -> str:
    return lines_of(source.reader, [session.record], number_of(source.reader))[0].title


@pages.get("/groups")
def groups(request: Request, source: From, wanted: Filter, page: PageNumber = 1) -> Response:
    placed = placed_sessions(source.reader, wanted, number_of(source.reader), MOST_PLACED)
    found = groups_of(placed)
    start = PAGE * (page - 1)
    return render(
        "groups.html",
        request,
        groups=found[start : start + PAGE],
        most=most_shown(placed, MOST_PLACED),
        total=len(found),
        more=len(found) > start + PAGE,
        page=page,
        filled=filled(wanted),
        histogram=histogram([reward for group in found for reward in group.rewards]),
        bars=outcome_bars(found),
    )


@pages.get("/group")
def group(request: Request, source: From, id: Annotated[str, Query(max_length=512)]) -> Response:
    number = number_of(source.reader)
    placed = placed_sessions(source.reader, SessionFilter(group=id, sessions=source.only), number)
    if not placed:
        raise NotFound(f"no session has the group {id}")
    loaded = list(
        LoadedSession.stream(
            source.reader, [source.reader.session(each.id) for each in placed[:PAGE]]
        )
    )
    lines = lines_of(source.reader, [each.record for each in loaded], number)
    answers = [_last_reply(each) for each in loaded]
    return render(
        "group.html",
        request,
        group=groups_of(placed)[0],
        columns=list(zip(lines, answers, strict=True)),
    )


@pages.get("/runs")
def runs(request: Request, source: From) -> Response:
    reader = source.reader
    known = [(run, run_state(reader, run), _took(reader, run)) for run in reader.runs()[::-1]]
    return render("runs.html", request, runs=known)


@pages.get("/runs/{run_id}")
def run(request: Request, source: From, run_id: str, compare: Text = None) -> Response:
    reader, record = source.reader, source.reader.run(run_id)
    series = {run_id: by_name(reader.metrics(run_id))}
    if compare:
        series[reader.run(compare).id] = by_name(reader.metrics(compare))
    wanted = SessionFilter(run=run_id)
    placed = placed_sessions(reader, wanted, number_of(reader), MOST_OF_RUN)
    found = groups_of(placed)
    account = token_account(reader, wanted, most=COUNTED_TOKENS)
    stages, lanes = stage_lanes(series[run_id])
    return render(
        "run.html",
        request,
        run=record,
        state=run_state(reader, record),
        attempts=reader.attempts(run_id),
        compare=compare or None,
        others=[other for other in reader.runs()[::-1] if other.id != run_id],
        charts=charts(series),
        bars=outcome_bars(found),
        groups=found,
        most=most_shown(placed, MOST_OF_RUN),
        account=account,
        fates=_fate_bars(account.fates),
        changes=task_changes(found)[:PAGE],
        stages=stages,
        lanes=lanes[-40:],
        policies=sorted(reader.policies(run_id), key=lambda one: one.published_at, reverse=True)[
            :PAGE
        ],
    )


@pages.get("/runs/{run_id}/lanes")
def run_lanes(request: Request, source: From, run_id: str) -> Response:
    wanted = SessionFilter(run=source.reader.run(run_id).id)
    number = number_of(source.reader)
    lines = session_lines(source.reader, wanted, number=number, limit=LANES)
    drawn = lanes_of(lines[::-1])
    return render("lanes.html", request, drawn=drawn, phases=PHASES)


@pages.get("/runs/{run_id}/findings")
def run_findings(request: Request, source: From, run_id: str) -> Response:
    found = findings_of_run(source.reader, run_id, MOST_OF_RUN)
    return render("findings.html", request, findings=found, most=MOST_OF_RUN)


@pages.get("/audit")
def audit(request: Request, source: From, wanted: Filter) -> Response:
    account = token_account(source.reader, wanted, most=COUNTED_TOKENS)
    return render(
        "audit.html",
        request,
        account=account,
        fates=_fate_bars(account.fates),
        wanted=wanted,
        filled=filled(wanted),
        runs=source.reader.runs()[::-1],
    )


def most_shown(placed: Sequence[Placed], most: int) -> int | None:
    """Return ``most``, the number of sessions that a page looks at, if it leaves out older ones."""
    return most if len(placed) == most else None


def number_of(reader: Reader) -> SessionNumber:
    """Return the function that makes a session's rewards one number, by its run's rule."""
    return CountedRewards(reader).number


def _fate_bars(fates: Mapping[Fate, int]) -> Any:
    lines = account_lines(fates)
    bars = bar({line.label: line.tokens for line in lines})
    return list(zip([line.fate for line in lines], bars, strict=True))


def _took(reader: Reader, run: RunRecord) -> float | None:
    """Return the seconds that all attempts at a run took, or ``None`` while it goes on."""
    if run.ended_at is None:
        return None
    attempts = [one for one in reader.attempts(run.id) if one.ended_at is not None]
    if not attempts:
        return run.ended_at - run.started_at
    return sum(one.ended_at - one.started_at for one in attempts if one.ended_at is not None)


def _part(made: Sequence[Turn], first: int, count: int) -> dict[str, Any]:
    """Return ``count`` turns from ``first`` on, for the template.

    At the end of the session, those from the first running turn on are ``unsettled``; the page of a
    running session asks for them again.
    """
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
    """Return a text that changes when a turn begins or ends."""
    return f"{len(made)}.{sum(turn.running for turn in made)}"


def _last_reply(session: LoadedSession) -> ShownMessage | None:
    for call in reversed(session.calls):
        if call.replies and call.kind is not CallKind.SIDE:
            return shown(call.replies[0], 0)
    return None
