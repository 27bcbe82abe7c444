"""The viewer's pages over a store with sessions of every sort."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from bridle.bench.gallery import fill
from bridle.cli.commands.viewer import YIELDS
from bridle.diagnosis.pages import SessionLine, SessionOrder, is_ascending, session_lines
from bridle.diagnosis.transcript import turns_of
from bridle.reconstruct.samples.rules import DEFAULT_RULES, rulings
from bridle.reconstruct.session import LoadedSession
from bridle.store.call import CallRow
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import CallKind, SessionRecord, new_id
from bridle.store.reward import Reward, RewardKind, RewardSource
from bridle.store.writing.writer import Writer
from bridle.viewer.app import number_of, viewer_app
from bridle.viewer.lanes import WIDTH, lanes_of
from bridle.viewer.prose import LONGEST, markdown, with_code
from bridle.viewer.rendering import Source, piece_texts
from bridle.viewer.turns import as_tree


def listed(text: str) -> list[str]:
    return re.findall(r'<td class="what"><a href="/sessions/(\w+)"', text)


def test_the_list_has_the_newest_session_first_and_pages(gallery: Any) -> None:
    assert listed(gallery.page("/sessions")) == gallery.sessions[::-1]
    assert listed(gallery.page("/sessions?page=2")) == []
    assert ">24 sessions<" in gallery.page("/sessions")


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ("harness=codex", lambda s: s.record.harness == "codex"),
        ("outcome=open", lambda s: s.record.sealed_at is None),
        ("outcome=timeout", lambda s: s.record.outcome == "timeout"),
        ("run=run_gallery2", lambda s: s.record.run_id == "run_gallery2"),
        ("task=task-3", lambda s: s.record.task_id == "task-3"),
        ("reward=tests&least=0.5", lambda s: s.rewards.get("tests", 0) >= 0.5),
        ("most=0", lambda s: s.rewards.get("tests") == 0),
        ("broke=any", lambda s: any(c.break_reason for c in s.calls)),
        ("broke=edited", lambda s: any(c.break_reason == "edited" for c in s.calls)),
        ("kind=subagent", lambda s: any(c.kind is CallKind.SUBAGENT for c in s.calls)),
        ("status=failed", lambda s: any(c.status == "failed" for c in s.calls)),
        ("model=none", lambda s: False),
        ("sampled_least=700", lambda s: s.captured >= 700),
        ("sampled_least=300&sampled_most=700", lambda s: 300 <= s.captured <= 700),
        ("model=policy", lambda s: any(c.model_served == "policy" for c in s.calls)),
        ("since=2026-09-21&until=2026-09-21", lambda s: s.record.run_id == "run_gallery1"),
        ("since=soon", lambda s: True),
        ("version=3", lambda s: any(c.version_start == 3 for c in s.calls)),
        ("fate=dropped&reason=kind_side", lambda s: any(c.kind is CallKind.SIDE for c in s.calls)),
        (
            "text=MEND+the+MODULE+task-1%3A",
            lambda s: any("Mend the module task-1:" in str(c.conversation) for c in s.calls),
        ),
        ("version=inf&least=nan&most=many", lambda s: True),
        ("version=1e300", lambda s: True),
        ("text=zzqz%25_", lambda s: False),
    ],
)
def test_each_filter_lists_the_sessions_that_it_names(
    gallery: Any, query: str, matches: Any
) -> None:
    loaded = LoadedSession.stream(gallery.reader, gallery.reader.sessions())
    wanted = [session.id for session in loaded if matches(session)][::-1]
    page = gallery.page(f"/sessions?{query}")
    assert listed(page) == wanted
    assert f'class="tally">{len(wanted)} session' in page


FIGURES: Mapping[SessionOrder, Callable[[SessionLine], Any]] = {
    SessionOrder.NEWEST: lambda line: line.record.created_at,
    SessionOrder.TASK: lambda line: line.record.task_id,
    SessionOrder.HARNESS: lambda line: line.record.harness,
    SessionOrder.OUTCOME: lambda line: line.record.outcome,
    SessionOrder.REWARD: lambda line: line.reward,
    SessionOrder.CALLS: lambda line: line.calls,
    SessionOrder.BREAKS: lambda line: line.breaks,
    SessionOrder.PROMPTED: lambda line: line.prompted,
    SessionOrder.TOKENS: lambda line: line.sampled,
    SessionOrder.VERSION: lambda line: line.versions and line.versions[0],
    SessionOrder.DURATION: lambda line: line.seconds,
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("order", list(SessionOrder))
def test_each_order_sorts_by_its_column(gallery: Any, order: SessionOrder, reverse: bool) -> None:
    number = number_of(gallery.reader)
    lines = session_lines(
        gallery.reader, SessionFilter(), order, number=number, limit=100, reverse=reverse
    )
    assert len(lines) == 24
    figures = [FIGURES[order](line) for line in lines]
    known = [figure for figure in figures if figure is not None]
    assert figures[: len(known)] == known
    ascending = is_ascending(order, reverse=reverse)
    assert known == sorted(known, reverse=not ascending)
    page = gallery.page(f"/sessions?order={order}&reverse={str(reverse).lower()}")
    (heading,) = re.findall('<th[^>]*aria-sort="([^"]*)"', page)
    assert heading == ("ascending" if ascending else "descending")
    assert listed(page) == [line.record.id for line in lines]


def test_a_line_counts_the_prompt_tokens_of_its_calls(gallery: Any) -> None:
    (line,) = session_lines(
        gallery.reader, SessionFilter(), number=number_of(gallery.reader), limit=1
    )
    sent = sum(call.prompt_tokens or 0 for call in gallery.reader.calls(line.record.id))
    assert line.prompted == sent > 0
    assert f'data-label="Tokens in" class="n">{sent:,}</td>' in gallery.page("/sessions")


def test_htmx_gets_only_the_list(gallery: Any) -> None:
    part = gallery.page("/sessions?harness=codex", **{"HX-Request": "true"})
    assert "<html" not in part
    assert listed(part)


def test_a_session_shows_its_whole_conversation(gallery: Any) -> None:
    session = LoadedSession.load(gallery.reader, gallery.sessions[3])
    raw = gallery.page(f"/sessions/{session.id}")
    page = html.unescape(raw)
    letters = re.sub(r"[\W\d_]", "", html.unescape(re.sub(r"<[^>]*>", "", raw)))
    for call in session.calls:
        for message in call.conversation.tail:  # type: ignore[union-attr]
            assert str(message.content) in page
        for message in call.replies:  # whose Markdown is rendered
            assert re.sub(r"[\W\d_]", "", str(message.content or "")) in letters
            assert (message.reasoning or "") in page
    assert "run_shell_command" in page
    assert "ran 10 tests" in page or not session.rewards


def texts_of(call: CallRow) -> str:
    """Return the text that the gallery made into a call's sampled tokens."""
    (said,) = call.replies
    return f"{said.reasoning or ''}{said.content}{said.tool_calls or ''}"


def test_the_tokens_of_a_turn_have_their_logprobs_and_rulings(gallery: Any) -> None:
    session = LoadedSession.load(gallery.reader, gallery.sessions[0])
    decided = {reply.call_id: ruling for reply, ruling in rulings(session, DEFAULT_RULES).items()}
    pieces = gallery.reader.vocabulary(session.record.vocabulary)
    for number, call in enumerate(session.calls, start=1):
        if not call.sampled_tokens:
            continue
        page = gallery.page(f"/sessions/{session.id}/turns/{number}/tokens")
        found = json.loads(re.search(r'application/json">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
        (strip,) = found["strips"]
        span = session.sampled[call.id][0].span
        assert [token[0] for token in strip["tokens"]] == span.token_ids.tolist()
        wrote = [pieces[token[0]] for token in strip["tokens"]]
        shown = "".join(token[1] for token in strip["tokens"])
        # A token with a part of a character shows it as bytes.
        assert re.sub(r"\\x[0-9a-f]{2}", "", shown) == b"".join(wrote).decode()
        assert b"".join(wrote).decode().strip() in texts_of(call)
        assert [token[2] for token in strip["tokens"]] == span.logprobs.tolist()  # type: ignore[union-attr]
        trained = [token[4] is None for token in strip["tokens"]]
        assert trained == decided[call.id].mask().tolist()


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"3 ", b"\xc2", b"\xb0C"], ["3 ", "\\xc2", "°C"]),
        ([b"a\xf0\x9f", b"\x98", b"\x80!"], ["a\\xf0\\x9f", "\\x98", "😀!"]),
        ([b"\xc2", b"a", b"\xc2", b"\xc2\xb0"], ["\\xc2", "a", "\\xc2", "°"]),
        ([b"\xff", b"", b"b\xb0"], ["\\xff", "", "b\\xb0"]),
        ([b"\xc2", None, b"\xb0"], ["\\xc2", "9", "\\xb0"]),
    ],
)
def test_a_character_of_several_tokens_is_the_text_of_the_last(
    pieces: list[bytes | None], texts: list[str]
) -> None:
    vocabulary = [piece for piece in pieces if piece is not None]
    ids = [9 if piece is None else vocabulary.index(piece) for piece in pieces]
    assert piece_texts(vocabulary, ids) == texts


def test_the_request_and_the_response_are_shown_as_they_were(gallery: Any) -> None:
    session = gallery.sessions[0]
    call = gallery.reader.calls(session)[1]
    shown = json.loads(gallery.page(f"/sessions/{session}/turns/2/request.json"))
    assert shown == json.loads(gallery.reader.request_body(call.id))
    shown = json.loads(gallery.page(f"/sessions/{session}/turns/2/response.json"))
    assert shown == json.loads(gallery.reader.response_body(call.id))


def test_a_long_session_comes_in_parts(gallery: Any) -> None:
    session = gallery.sessions[0]
    rest = gallery.page(f"/sessions/{session}/turns?first=4&count=2")
    assert re.findall(r'id="turn-(\d+)"', rest) == ["4", "5"]
    assert "first=6" in rest


def test_an_open_session_asks_for_new_turns_and_gets_nothing_twice(gallery: Any) -> None:
    session = gallery.sessions[-1]
    page = html.unescape(gallery.page(f"/sessions/{session}"))
    again = re.search(r'data-live id="live" hx-get="([^"]+)"', page)
    assert again is not None
    assert gallery.client.get(again[1]).status_code == 204
    sealed = gallery.page(f"/sessions/{gallery.sessions[0]}")
    assert "data-live" not in sealed


def test_the_tree_has_every_turn_and_the_reason_of_every_break(gallery: Any) -> None:
    session, number = gallery.broken()
    calls = gallery.reader.calls(session)
    page = gallery.page(f"/sessions/{session}/tree")
    found = re.findall(r'id="node-(\d+)"', page)
    assert sorted(map(int, found)) == list(range(1, len(calls) + 1))
    assert f"broke: {calls[number - 1].break_reason.replace('_', ' ')}" in page


def test_a_sub_agent_stands_below_the_turn_after_which_it_began(gallery: Any) -> None:
    loaded = LoadedSession.load(gallery.reader, gallery.sessions[0])
    rows = as_tree(turns_of(loaded))
    places = {turn.number: place for place, (turn, _) in enumerate(rows)}
    agents = [turn for turn, _ in rows if turn.call.kind is CallKind.SUBAGENT]
    assert agents
    for agent in agents:
        before = next(
            turn
            for turn, _ in sorted(rows, key=lambda row: -row[0].number)
            if turn.number < agent.number and turn.call.kind is CallKind.MAIN
        )
        assert places[agent.number] == places[before.number] + 1
        assert rows[places[agent.number]][1] == rows[places[before.number]][1] + 1
    assert sorted(places) == list(range(1, len(loaded.calls) + 1))


def test_the_difference_shows_the_first_token_that_a_break_did_not_continue(gallery: Any) -> None:
    session, number = gallery.broken()
    loaded = LoadedSession.load(gallery.reader, session)
    call = loaded.calls[number - 1]
    parent = loaded.by_id[call.parent_call_id or ""]
    recorded = [
        *loaded.tree.prompt(parent).tolist(),  # type: ignore[union-attr]
        *loaded.sampled[parent.id][0].span.token_ids.tolist(),
    ]
    prompt = loaded.tree.prompt(call).tolist()  # type: ignore[union-attr]
    shared = next(i for i, (a, b) in enumerate(zip(recorded, prompt, strict=False)) if a != b)
    page = gallery.page(f"/sessions/{session}/turns/{number}/diff")
    assert f"{shared:,} of {len(recorded):,} recorded tokens are continued" in page
    pieces = gallery.reader.vocabulary(loaded.record.vocabulary)
    first = {"removed": recorded[shared], "added": prompt[shared]}
    for change, token in first.items():
        assert f'{change}">{pieces[token].decode()}<' in html.unescape(page)


def test_groups_and_runs_lead_to_their_sessions(gallery: Any) -> None:
    page = html.unescape(gallery.page("/groups?run=run_gallery1"))
    links = re.findall(r'href="(/group\?[^"]+)"', page)
    assert links
    columns = gallery.page(links[0])
    assert columns.count("<article") == 4
    assert "run_gallery2" in gallery.page("/runs")
    run = html.unescape(gallery.page("/runs/run_gallery1?compare=run_gallery2"))
    steps = {metric.step for metric in gallery.reader.metrics("run_gallery1")}
    assert min(steps) == 0
    assert f"Reward, mean, step 1 to {max(steps) + 1}: " in run
    assert "step 0" not in run
    data = re.findall('<script type="application/json">(.*)</script>', run)
    drawn = [json.loads(each) for each in data]
    assert len(drawn) > 5
    for chart in drawn:
        assert chart["steps"] == [step + 1 for step in sorted(steps)]
        assert list(chart["series"]) == ["run_gallery1", "run_gallery2"]
        assert {len(values) for values in chart["series"].values()} == {len(steps)}
    fate = re.search(r'href="(/sessions\?run=run_gallery1&fate=dropped&reason=kind_side)"', run)
    assert fate is not None
    assert listed(gallery.page(fate[1]))


def test_a_runs_sessions_are_drawn_over_time(gallery: Any) -> None:
    page = html.unescape(gallery.page("/runs/run_gallery1/lanes"))
    wanted, number = SessionFilter(run="run_gallery1"), number_of(gallery.reader)
    lines = session_lines(gallery.reader, wanted, number=number, limit=100)
    links = re.findall(r'<th scope="row"><a href="/sessions/(\w+)"', page)
    assert links == [line.record.id for line in lines][::-1]
    drawn = lanes_of(lines[::-1])
    opened = min(line.record.created_at for line in lines)
    for lane in drawn.lanes:
        calls = next(part for part in lane.phases if part.name == "calls")
        begin = (lane.line.started_at - opened) / drawn.seconds * WIDTH  # type: ignore[operator]
        assert calls.x == pytest.approx(begin, abs=0.1)
        assert calls.seconds == pytest.approx(lane.line.seconds)
        assert all(part.x + part.width <= WIDTH + 0.2 for part in lane.phases)
    assert lanes_of([]).lanes == ()


def test_the_audit_adds_up_over_the_store_and_for_a_session(gallery: Any) -> None:
    page = gallery.page("/audit")
    (captured,) = re.findall(r'captured</th><td class="n">([\d,]+)', page)
    sampled = sum(
        call.sampled_tokens or 0 for s in gallery.sessions for call in gallery.reader.calls(s)
    )
    assert captured == f"{sampled:,}"
    assert "not accounted" not in page
    own = gallery.page(f"/sessions/{gallery.sessions[0]}/audit")
    assert "Every sampled token is accounted for." in own


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/sessions/session_nope", 404, "no session session_nope"),
        ("/sessions/{0}/turns/99/tokens", 404, "has no turn 99"),
        ("/sessions/{0}/turns/1/other.json", 404, "a request and a response, no other"),
        ("/runs/nope", 404, "no run nope"),
        ("/nowhere", 404, "There is no page at /nowhere."),
        ("/runs/nope/lanes", 404, "no run nope"),
        ("/group?id=nope", 404, "no session has the group nope"),
        ("/sessions?page=0", 422, "page"),
        ("/sessions?page=99999999999999999999", 422, "page"),
        ("/sessions?order=up", 422, "order"),
    ],
)
def test_what_is_not_there_is_a_page_that_says_so(
    gallery: Any, path: str, status: int, words: str
) -> None:
    reply = gallery.client.get(path.format(gallery.sessions[0]))
    assert reply.status_code == status
    assert words in html.unescape(reply.text)
    assert "All sessions" in reply.text
    head = gallery.client.head(path.format(gallery.sessions[0]))
    assert (head.status_code, head.headers["content-type"]) == (status, "text/html; charset=utf-8")


def test_another_method_is_refused_with_those_that_there_are(gallery: Any) -> None:
    reply = gallery.client.delete("/sessions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET")
    assert "Method Not Allowed." in reply.text


def test_pages_whose_server_records_nothing_have_no_form(gallery: Any) -> None:
    assert "/rewards" not in gallery.page(f"/sessions/{gallery.sessions[0]}")
    reply = gallery.client.post(f"/sessions/{gallery.sessions[0]}/rewards")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET")


def test_recorded_text_cannot_become_markup(gallery: Any) -> None:
    """Token texts go into a script element, everything else through the template's escaping."""
    page = gallery.client.get(f"/sessions/{gallery.sessions[0]}")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "<script>" not in gallery.page("/sessions?task=<script>x</script>")


def test_markdown_of_a_reply_becomes_no_markup_of_its_own() -> None:
    hostile = "<script>x</script> [a](javascript:alert(1)) ![i](http://x/y.png) `<b>`"
    for text in (hostile, hostile + "\n\n```python\n</pre><b>\n```", hostile + "x" * LONGEST):
        shown = markdown(text)
        assert not re.search(r"<(script|img|b)\b|href=.javascript", shown)
    code = markdown("```python\ndef f(): return 1\n```")
    assert '<span class="k">def</span>' in code
    assert with_code("do `x <b>` <i>") == "do <code>x &lt;b&gt;</code> &lt;i&gt;"


def test_a_session_is_called_by_its_request_and_has_an_outline(gallery: Any) -> None:
    page = gallery.page(f"/sessions/{gallery.sessions[3]}")
    assert "<h1>Mend the module task-0:" in page
    assert '<details class="folded">' in page or "You are a coding agent" in page
    outline = page[page.index('class="outline"') : page.index("</ol>")]
    session = LoadedSession.load(gallery.reader, gallery.sessions[3])
    assert outline.count("<li>") == len(session.calls)
    assert "run_shell_command" in outline


def test_the_command_serves_the_store_without_torch(gallery: Any) -> None:
    code = (
        "import sys; from bridle.cli.program import app\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        f"app(['viewer', '--store', {gallery.store!r}, '--port', '0', '--json'])"
    )
    # It yields the processor to all that is busier.
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        assert run.stdout is not None
        url = json.loads(run.stdout.readline())["url"]
        try:
            assert "gallery-3" in client.get(f"{url}/sessions").text
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getpriority(os.PRIO_PROCESS, run.pid) == min(19, own + YIELDS)
            assert client.get(f"{url}/static/viewer.js").status_code == 200
            assert client.post(f"{url}/sessions").status_code == 405
            head = client.head(f"{url}/sessions")
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) > 1000
            for foreign in ({"host": "a.example"}, {"origin": "https://a.example"}):
                reply = client.get(f"{url}/sessions", headers=foreign)
                assert reply.status_code == 403
        finally:
            run.send_signal(signal.SIGINT)
        assert run.stdout.read().strip() == "False"


def test_a_session_shows_its_siblings_and_the_turn_that_lost_it(tmp_path: Path) -> None:
    """The chance of success before each branch is that of the siblings from there."""
    store = str(tmp_path / "siblings.db")
    other, recorded, *_ = fill(store, 2, turns=3)
    sibling = new_id("ses")
    with Reader(store) as reader:
        call = reader.call_ids(recorded)[1]
    with Writer(store) as writer:
        writer.add_sync(
            SessionRecord(
                sibling, 1.0, group_id=call, origin_session_id=recorded, origin_call_id=call
            ),
            Reward(sibling, "reward", 1.0, 1.0, source=RewardSource.VERIFIER),
            Reward(recorded, "lost_at_turn", 1.0, 1.0, turn=1, kind=RewardKind.FINDING),
        )
    with Reader(store) as reader:
        client = TestClient(viewer_app(Source(reader, store)))
        page, own, none = (
            client.get(f"/sessions/{one}").text for one in (recorded, sibling, other)
        )
    assert "1 of 1" in page
    assert re.search(r"0\.2\d* to 1", page)
    assert 'turn <a href="#turn-1">1</a> lost it' in page
    assert f'href="/sessions/{sibling}"' in page
    assert f"/group?id={call}" in page
    assert f'href="/sessions/{recorded}"' in own
    assert "Succeeded" not in none
