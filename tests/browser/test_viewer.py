"""The viewer in a browser: filters, live update, tokens, differences, keyboard, accessibility."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridle.bench.corpus import corpus
from bridle.bench.gallery import Story
from bridle.store.reading.queries import Reader
from bridle.store.records import Message
from bridle.store.writing.writer import Writer

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")
expect = sync_api.expect

pytestmark = pytest.mark.browser


def broken(served: Any) -> tuple[str, int]:
    """A session with a break, and the turn that broke."""
    with Reader(served.store) as reader:
        for session in served.sessions:
            for number, call in enumerate(reader.calls(session), start=1):
                if call.break_reason is not None:
                    return session, number
    raise AssertionError("no session has a break")


def addresses(served: Any) -> dict[str, str]:
    session, _ = broken(served)
    return {
        "sessions": "/sessions",
        "session": f"/sessions/{session}",
        "trained": f"/sessions/{served.trained}",
        "tree": f"/sessions/{session}/tree",
        "session-audit": f"/sessions/{session}/audit",
        "groups": "/groups",
        "group": "/group?id=run_gallery1/task-0/0",
        "runs": "/runs",
        "run": "/runs/run_gallery1?compare=run_gallery2",
        "audit": "/audit",
        "nothing": "/sessions?harness=none",
    }


def complaints(page: Any, axe: str) -> list[tuple[str, list[str]]]:
    """The serious violations of accessibility on a page, with some of the elements."""
    page.evaluate(axe)
    found = page.evaluate("axe.run({preload: false}).then(result => result.violations)")
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    return [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in serious]


def test_every_filter_changes_the_list_and_the_address(served: Any, page: Any) -> None:
    page.goto(f"{served.url}/sessions")
    lines = page.locator("[data-line]")
    expect(lines).to_have_count(24)
    page.get_by_text("More filters").click()
    for name, value in {
        "harness": "codex",
        "outcome": "timeout",
        "broke": "any",
        "run": "run_gallery1",
        "reward": "tests",
        "kind": "subagent",
        "status": "failed",
        "fate": "dropped",
    }.items():
        field = page.locator(f"#filters select[name={name}]")
        field.select_option(value=value)
        expect(page).to_have_url(re.compile(f"{name}={value}"))
        expect(page.locator(".tally")).to_contain_text(re.compile(r"\d+ session"))
        number = int(page.locator(".tally").inner_text().split()[0])
        expect(lines).to_have_count(number)
        field.select_option(value="")
        expect(lines).to_have_count(24)
    for name, value, count in (
        ("text", "mend the module task-1:", 4),
        ("task", "task-2", 4),
        ("group", "run_gallery1/task-0/0", 4),
        ("version", "1", None),
        ("model", "policy", 24),
        ("sampled_least", "9999999", 0),
        ("least", "1", None),
        ("most", "0", None),
        ("reason", "kind_side", None),
    ):
        field = page.locator(f"#filters input[name={name}]")
        field.fill(value)
        expect(page).to_have_url(re.compile(f"[?&]{name}=[^&]"))
        if count is not None:
            expect(lines).to_have_count(count)
        field.fill("")
        expect(lines).to_have_count(24)
    page.locator("input[name=reverse]").check()
    expect(lines.first).to_contain_text("gallery-0")
    expect(page).to_have_url(re.compile("reverse=true"))
    page.reload()
    expect(lines.first).to_contain_text("gallery-0")
    page.get_by_role("link", name="Calls", exact=True).click()
    heading = page.get_by_role("columnheader", name="Calls")
    expect(heading).to_have_attribute("aria-sort", "descending")
    heading.get_by_role("link").press("Enter")
    expect(heading).to_have_attribute("aria-sort", "ascending")


def test_a_long_session_comes_whole_while_one_scrolls(served: Any, page: Any) -> None:
    session = served.sessions[0]
    with Reader(served.store) as reader:
        turns = len(reader.calls(session))
    page.goto(f"{served.url}/sessions/{session}")
    assert page.locator(".turn").count() < turns
    for _ in range(6):
        page.mouse.wheel(0, 20_000)
        page.wait_for_timeout(200)
    expect(page.locator(".turn")).to_have_count(turns)


def test_a_link_leads_to_a_turn_that_has_not_come_yet(served: Any, page: Any) -> None:
    session = served.sessions[0]
    with Reader(served.store) as reader:
        last = len(reader.calls(session))
    page.goto(f"{served.url}/sessions/{session}/audit")
    page.get_by_role("link", name=str(last), exact=True).click()
    expect(page.locator(f"#turn-{last}")).to_be_in_viewport()
    page.evaluate("location.hash = '#turn-1'")
    expect(page.locator("#turn-1")).to_be_in_viewport()
    page.goto(f"{served.url}/sessions/{session}#turn-999")
    expect(page.locator(".turn")).to_have_count(last)


def test_a_narrow_list_shows_every_figure_with_its_heading(served: Any, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    for path in ("/sessions", "/groups", "/runs", f"/sessions/{served.sessions[0]}/audit"):
        page.goto(served.url + path)
        # At once: a list of open sessions is replaced every two seconds.
        cells = page.evaluate(
            "[...document.querySelectorAll('[data-line]')].map(line => [...line.cells].map("
            "cell => [cell.textContent, cell.getBoundingClientRect().left,"
            " cell.getBoundingClientRect().right]))"
        )
        assert len(cells[0]) > 4, path
        for text, left, right in cells[0]:
            assert 0 <= left <= right <= 390, (path, text)
            assert not text.strip() or left < right, (path, text)


def test_a_token_is_described_under_the_mouse_by_a_click_and_by_arrow_keys(
    served: Any, page: Any
) -> None:
    page.goto(f"{served.url}/sessions/{served.sessions[0]}")
    page.locator("#turn-2 [data-tokens]").click()
    strip = page.locator("#turn-2 .strip").first
    strip.locator(".tk").nth(3).hover()
    expect(strip.locator(".about")).to_contain_text("logprob -")
    expect(strip.locator(".about")).to_contain_text("trainable")
    first = strip.locator(".about").inner_text()
    strip.locator(".tk").nth(5).click()
    for part in ("position ", "id ", "logprob -", "probability ", "version ", "trainable"):
        expect(strip.locator(".about")).to_contain_text(part)
    held = strip.locator(".about").inner_text()
    strip.locator(".tk").nth(3).hover()
    expect(strip.locator(".about")).to_have_text(held)
    strip.locator(".tk").nth(5).click()
    strip.locator(".tk").nth(3).hover()
    expect(strip.locator(".about")).to_have_text(first)
    strip.locator(".run").focus()
    page.keyboard.press("ArrowRight")
    expect(strip.locator(".about")).not_to_have_text(first)
    page.get_by_role("button", name="Show the prompt's new tokens too").click()
    expect(page.locator("#turn-2 .strip h4").first).to_contain_text("new in the prompt")


def test_a_trained_token_shows_the_trainers_scores_and_tokens_are_shaded_by_them(
    served: Any, page: Any
) -> None:
    page.goto(f"{served.url}/sessions/{served.trained}")
    page.locator("#turn-2 [data-tokens]").click()
    strip = page.locator("#turn-2 .strip").first
    strip.locator(".tk").nth(5).click()
    about = strip.locator(".about")
    for part in ("trainer’s logprob -", "at version 4", "engine − trainer 0.0625"):
        expect(about).to_contain_text(part)
    for part in ("entropy 0.750 nats", "trained in step 5 of run_gallery1"):
        expect(about).to_contain_text(part)
    tokens = strip.locator(".tk").count()
    for by, shade in (("engine − trainer", ".s3"), ("entropy", ".s2")):
        strip.get_by_label("Shade by").select_option(by)
        expect(strip.locator(f".tk{shade}")).to_have_count(tokens)
    expect(about).to_contain_text("the less certain the policy was")
    expect(strip.locator(".tk.pinned")).to_have_count(1)


def test_the_difference_of_a_break_is_shown_in_tokens(served: Any, page: Any) -> None:
    session, number = broken(served)
    page.goto(f"{served.url}/sessions/{session}/tree")
    page.locator(f"#node-{number}").get_by_role("button", name="What changed").click()
    shown = page.locator(f"#node-{number} .diff")
    expect(shown).to_contain_text("recorded tokens are continued")
    assert shown.locator(".tk.removed").count() > 0
    assert shown.locator(".tk.added").count() > 0


def test_request_and_response_are_shown_on_demand(served: Any, page: Any) -> None:
    page.goto(f"{served.url}/sessions/{served.sessions[0]}")
    turn = page.locator("#turn-2")
    turn.get_by_role("button", name="Request").click()
    expect(turn.locator(".slot")).to_contain_text('"model": "policy"')
    turn.get_by_role("button", name="Response").click()
    expect(turn.locator(".slot")).to_contain_text('"role": "assistant"')


def test_a_turn_that_is_recorded_appears_on_an_open_page(served: Any, page: Any) -> None:
    session = served.sessions[-1]
    with Reader(served.store) as reader:
        record, turns = reader.session(session), len(reader.calls(session))
    page.goto(f"{served.url}/sessions/{session}")
    for _ in range(4):
        page.mouse.wheel(0, 20_000)
        page.wait_for_timeout(200)
    expect(page.locator(".turn")).to_have_count(turns)
    with Writer(served.store) as writer:
        story = Story(writer, record, corpus(), 11, random.Random(99))
        story.clock += 5000
        story.call((Message("user", "What happens while I look?"),), "This appears by itself.")
    expect(page.locator(f"#turn-{turns + 1}")).to_contain_text("This appears by itself.")


def test_the_keyboard_moves_opens_and_filters(served: Any, page: Any) -> None:
    page.goto(f"{served.url}/sessions")
    expect(page.locator(".tally")).to_contain_text("24 sessions")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator("tr.at")).to_contain_text("gallery-22")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/sessions/session_"), wait_until="load")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("t")
    expect(page.locator("#turn-2 token-strip")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    for key, name in (("g", "Groups"), ("r", "Runs"), ("a", "Audit"), ("s", "Sessions")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        page.wait_for_load_state("load")
    expect(page.locator(".tally")).to_contain_text("24 sessions")
    page.keyboard.press("/")
    page.keyboard.type("task-1:")
    expect(page.locator("[data-line]")).to_have_count(4)


def test_a_click_scores_a_session(served: Any, page: Any) -> None:
    session = served.sessions[6]
    page.goto(f"{served.url}/sessions/{session}")
    score = page.get_by_role("form", name="Score")
    score.get_by_role("button", name="0.5").click()
    expect(score.get_by_role("button", name="0.5")).to_have_attribute("aria-pressed", "true")
    score.get_by_role("button", name="1", exact=True).focus()
    page.keyboard.press("Enter")
    expect(score.get_by_role("button", name="1", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    page.get_by_text("Annotate").click()
    page.get_by_label("Turn (empty: the session)").fill("2")
    page.get_by_label("Value").fill("-1")
    page.get_by_role("button", name="Record", exact=True).click()
    expect(page.locator("#turn-2 header")).to_contain_text("reward -1")
    with Reader(served.store) as reader:
        given = [(one.value, one.turn, one.source) for one in reader.rewards(session)]
    assert given[-3:] == [(0.5, None, "operator"), (1.0, None, "operator"), (-1.0, 2, "operator")]


def test_the_sessions_of_a_filter_are_downloaded(served: Any, page: Any) -> None:
    page.goto(f"{served.url}/sessions?harness=codex")
    page.get_by_label("Export these as").select_option("sharegpt")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download").click()
    rows = Path(waiting.value.path()).read_text().splitlines()
    assert rows
    assert all("conversations" in row for row in rows)


def test_a_fate_leads_to_its_sessions(served: Any, page: Any) -> None:
    page.goto(f"{served.url}/runs/run_gallery1")
    page.get_by_role("link", name="dropped: kind side").click()
    # Of one of the twelve, a step has trained every token.
    expect(page.locator("[data-line]")).to_have_count(11)
    page.goto(f"{served.url}/runs/run_gallery1")
    page.locator("select[name=compare]").select_option("run_gallery2")
    expect(page).to_have_url(re.compile("compare=run_gallery2"))
    chart = page.locator("figure").filter(has_text="Reward, mean")
    expect(chart.locator("canvas")).to_be_visible()
    last = chart.locator("b").inner_text()
    chart.locator(".u-over").hover(position={"x": 2, "y": 20})
    expect(chart.locator("b")).to_have_text(re.compile(r"step 1: 0\.\d+ · 0\.\d+"))
    page.get_by_role("heading", level=1).hover()
    expect(chart.locator("b")).to_have_text(last)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_is_accessible_fits_and_is_drawn(
    served: Any, page: Any, axe: str, width: int, scheme: str
) -> None:
    """``BRIDLE_SCREENSHOTS`` names a folder for the pictures."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    folder = os.environ.get("BRIDLE_SCREENSHOTS")
    for name, path in addresses(served).items():
        page.goto(served.url + path)
        if name == "tree":
            page.get_by_role("button", name="What changed").first.click()
            expect(page.locator(".diff").first).to_be_visible()
        if name == "run":
            page.mouse.wheel(0, 20_000)
            expect(page.get_by_role("heading", name="Sessions over time")).to_be_visible()
        if name in ("session", "trained"):
            page.locator("#turn-2 [data-tokens]").click()
            expect(page.locator("token-strip .tk").first).to_be_visible()
        if name == "trained":
            page.locator("token-strip .tk").nth(12).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert complaints(page, axe) == [], name
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=f"{folder}/{name}-{width}-{scheme}.png", full_page=True)


def test_a_bundle_is_read_from_files(served: Any, page: Any, axe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bridle", "viewer", "run_gallery1", "--store", served.store]
    subprocess.run([*command, "--bundle", str(tmp_path)], check=True)
    with Reader(served.store) as reader:
        turns = len(reader.calls(served.sessions[0]))
    page.goto((tmp_path / "index.html").as_uri())
    expect(page.locator("line-chart canvas").first).to_be_visible()
    expect(page.get_by_role("heading", name="Sessions over time")).to_be_visible()
    assert complaints(page, axe) == []
    page.get_by_role("link", name="sessions", exact=True).click()
    expect(page.locator("[data-line]")).to_have_count(12)
    assert complaints(page, axe) == []
    page.locator("[data-line]").last.locator("a").first.click()
    expect(page.locator(".turn")).to_have_count(turns)
    page.locator("#turn-2 details.part summary").first.click()
    page.locator("#turn-2 .tk").nth(3).hover()
    expect(page.locator("#turn-2 .about")).to_contain_text("logprob -")
    assert complaints(page, axe) == []
    page.keyboard.press("g")
    page.keyboard.press("g")
    expect(page.get_by_role("heading", level=1)).to_have_text("Groups")
