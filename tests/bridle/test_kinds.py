"""``bridle kind`` and the option ``--rules``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from bridle.reconstruct import open_store
from bridle.store.reading.accounts import stored_account
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.records import CallKind


def test_a_kind_is_set_and_taken_back_and_the_account_follows(
    bridle: Callable[..., Result], recorded: str, store: str
) -> None:
    def trainable() -> int:
        with Reader(store) as reader:
            return stored_account(reader, SessionFilter()).of("trainable")

    def audited() -> int:
        return int(json.loads(bridle("audit", "--json", "--store", store).output)["trainable"])

    whole = audited()
    assert trainable() == whole > 0
    done = bridle("kind", recorded, "1", "side", "--role", "title", "--json", "--store", store)
    kinds = json.loads(done.output)["kinds"]
    first = next(iter(kinds))
    assert kinds[first] == "side"
    assert trainable() == 0, "the account was of other kinds"
    with open_store(store) as opened:
        session = opened.session(recorded)
        assert session.calls[0].kind is CallKind.SIDE
        assert session.calls[0].role == "title"
    assert audited() == trainable() < whole
    bridle("kind", recorded, "1", "auto", "--store", store)
    assert audited() == trainable() == whole


def test_a_whole_line_can_be_said_at_once(
    bridle: Callable[..., Result], recorded: str, store: str
) -> None:
    told = json.loads(
        bridle("kind", recorded, "1", "subagent", "--line", "--json", "--store", store).output
    )
    assert set(told["kinds"].values()) == {"subagent"}


@pytest.mark.parametrize(
    "wrong", [("99", "side"), ("1", "holiday")], ids=["no such turn", "no such kind"]
)
def test_a_wrong_turn_or_kind_is_refused(
    bridle: Callable[..., Result], recorded: str, store: str, wrong: tuple[str, str]
) -> None:
    assert bridle("kind", recorded, *wrong, "--store", store).exit_code != 0


def test_a_session_without_a_call_has_no_turns_yet(
    bridle: Callable[..., Result], proxy_url: str, store: str
) -> None:
    made = httpx.post(f"{proxy_url}/bridle/v1/sessions", json={}).json()["id"]
    for command in (("kind", made, "1", "side"), ("reward", made, "1", "--turn", "1")):
        refused = bridle(*command, "--store", store)
        assert refused.exit_code == 1
        assert refused.stderr == f"bridle: session {made} has no turns yet\n"


def test_an_unknown_rule_is_named_with_those_there_are(
    bridle: Callable[..., Result], store: str
) -> None:
    refused = bridle("audit", "--rules", '{"nope": 1}', "--store", store)
    assert refused.exit_code == 2
    said = "bridle: --rules: there is no rule 'nope'; there are kinds, partial, "
    assert refused.stderr.startswith(said)
    assert refused.stderr.count("\n") == 1


def test_rules_are_given_as_text_or_file(
    bridle: Callable[..., Result], recorded: str, store: str, tmp_path: Path
) -> None:
    none = '{"kinds": ["compaction"]}'
    file = tmp_path / "rules.json"
    file.write_text(none)
    for given in (none, str(file)):
        done = bridle("audit", recorded, "--rules", given, "--json", "--store", store)
        assert json.loads(done.output)["trainable"] == 0
    for wrong in ('{"colour": 1}', str(tmp_path / "none.json"), "{"):
        assert bridle("audit", "--rules", wrong, "--store", store).exit_code == 2


def test_the_commands_of_the_page_that_set_rules_run(
    bridle: Callable[..., Result],
    recorded: str,
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```sh\n(bridle export policy2.*?)```", page, re.DOTALL)
    for command in block.splitlines():
        done = bridle(*shlex.split(command)[1:], "--store", store)
        assert done.exit_code == 0, done.output


def test_what_one_session_masks_and_another_drops_for_a_reason_adds_up(
    bridle: Callable[..., Result], proxy_url: str, store: str
) -> None:
    chat = f"{proxy_url}/s/{{}}/v1/chat/completions"

    def say(session: str, *messages: dict[str, str]) -> dict[str, str]:
        asked = {"model": "m", "messages": messages}
        reply = httpx.post(chat.format(session), json=asked, timeout=60).raise_for_status()
        return reply.json()["choices"][0]["message"]  # type: ignore[no-any-return]

    user = {"role": "user", "content": "hi"}
    say("old", user)
    first = say("mixed", user)
    httpx.put(f"{proxy_url}/bridle/v1/policy", json={"version": 1}).raise_for_status()
    say("mixed", user, first, user)
    rules = '{"oldest_version": 1}'
    table = json.loads(bridle("audit", "--rules", rules, "--json", "--store", store).stdout)
    masked, dropped = (table[fate]["version_stale"] for fate in ("masked", "dropped"))
    assert masked > 0 < dropped
    assert masked + dropped == table["captured"] - table["trainable"]
