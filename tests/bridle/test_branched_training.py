"""``bridle train`` with groups of siblings, from the agent's processes to the report."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bridle.cli.program import app
from bridle.diagnosis.values import branches_of
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.rewards import CountedRewards
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("warm_start")]

TURNS = 4
AGENT = f"""
import json, os, sys, urllib.request

messages = [{{"role": "user", "content": sys.argv[1]}}]
for number in range({TURNS}):
    body = {{"model": "policy", "max_tokens": 4, "messages": messages}}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {{
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        }},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {{"role": "user", "content": f"And {{number}}?"}}]
print(message["content"])
"""


@pytest.mark.parametrize("estimator", ["siblings", "turn_values"])
@pytest.mark.sampled(2)
def test_siblings_are_trained_from_their_branch_on(
    training_arguments: Callable[..., list[str]], tmp_path: Path, estimator: str
) -> None:
    """Report, audit, doctor and viewer agree about them."""
    arguments = training_arguments()
    (tmp_path / "agent.py").write_text(AGENT)
    changed = (
        "groups.branch=0.5",
        "groups.size=3",
        "training.max_staleness=0",
        # What a group of equal rewards trains is nothing by chance, not by its branch.
        "training.filters.drop_zero_variance=false",
        f"training.advantages.baseline={estimator}",
    )
    options = [word for one in changed for word in ("--set", one)]
    done = CliRunner().invoke(app, [*arguments, *options, "--steps", "3"])
    assert done.exit_code == 0, done.output
    store = str(tmp_path / "out" / "bridle.db")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    with Reader(store) as reader:
        (run,) = reader.runs("train")
        groups: dict[str, list[SessionRecord]] = defaultdict(list)
        for session in reader.sessions(run=run.id):
            groups[session.group_id or ""].append(session)
        origins = {
            name: {(one.origin_session_id, one.origin_call_id) for one in group}
            for name, group in groups.items()
        }
        assert all(len(every) == 1 for every in origins.values()), "one branch point each"
        branched = [name for name, (origin,) in origins.items() if origin[0] is not None]
        assert set(branched) == {f"{run.id}.3", f"{run.id}.5"}, "group 1 has nothing to re-enter"
        live = 0
        for name, group in groups.items():
            for session in group:
                live += live_tokens(reader, session)
                assert audit_session(reader, session.id, bodies=True).clean
            assert len(group) == 3, name
        fates = [report[f"tokens_{fate}"] for fate in ("trained", "trainable", "masked", "dropped")]
        assert report["tokens_captured"] == live == sum(fates)
        assert report["tokens_trained"] == live
        assert report["sessions_re_entered"] == 6
        for name in branched:
            ((origin, call),) = origins[name]
            shows_siblings(reader, str(origin), str(call), {one.id for one in groups[name]})
    assert "6 of which re-entered another" in done.output
    assert "without token ids" not in done.output


def live_tokens(reader: Reader, session: SessionRecord) -> int:
    """Return the number of a session's trainable tokens: those from its branch on."""
    calls = reader.calls(session.id)
    live = [call for call in calls if call.replayed_call_id is None]
    replayed = [call.replayed_call_id for call in calls if call.replayed_call_id is not None]
    assert len(calls) == TURNS
    if session.origin_session_id is not None:
        recorded = [call.id for call in reader.calls(session.origin_session_id)]
        assert replayed == recorded[: recorded.index(session.origin_call_id or "")]
        assert replayed, "the first call is no branch"
    episode = episode_of(LoadedSession.load(reader, session.id))
    tokens = sum(call.sampled_tokens or 0 for call in live)
    assert sum(int(sample.mask.sum()) for sample in episode.samples) == tokens
    return tokens


def shows_siblings(reader: Reader, origin: str, call: str, siblings: set[str]) -> None:
    """Assert what the viewer's page of the origin shows: the siblings behind the turn."""
    counted = CountedRewards(reader)
    calls: Any = reader.calls(origin)
    shown = branches_of(reader, origin, calls, counted.number)
    turn = next(number for number, one in enumerate(calls, 1) if one.id == call)
    (branch,) = [one for one in shown if one.turn == turn]
    assert siblings <= {one.id for one, _ in branch.siblings}
