"""Sessions with a planted turn that loses them, recorded and re-entered through a proxy."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections import Counter
from collections.abc import Generator
from typing import Any, Self

import httpx
import numpy as np
import pytest

from bridle.diagnosis.values import branches_of
from bridle.diagnosis.why import Explanation
from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.harnesses.client import Client, SessionRequest
from bridle.reconstruct.audit import audit_session
from bridle.reconstruct.episodes import episode_of
from bridle.reconstruct.rewards import CountedRewards
from bridle.reconstruct.session import LoadedSession
from bridle.run.branching import Branches
from bridle.run.config import GroupsConfig
from bridle.run.siblings import Entry, Recording, Sibling
from bridle.run.why import explained, finding, record
from bridle.trainer.collection.branching import Where

TLS = ssl.create_default_context()
SESSIONS = int(os.environ.get("BRIDLE_WHY_SESSIONS", "5"))
TOOLS = [{"type": "function", "function": {"name": "step", "parameters": {"type": "object"}}}]


class Policy:
    """A policy that takes a step a turn, and answers whether it succeeded.

    A recorded session takes the wrong step at the turn ``fatal``, and fails.
    """

    def __init__(self, turns: int, fatal: int | None, seed: int) -> None:
        self.turns, self.fatal, self.recording = turns, fatal, True
        # Sessions run at once, so that other chances would not be drawn in a fixed order.
        self.chances = {"right": 1.0, "wrong": 0.0}
        self._drawn = random.Random(seed)

    def __call__(self, request: Any) -> ScriptedReply:
        steps = [m["content"] for m in request.messages if m["role"] == "tool"]
        number = len(steps) + 1
        if number < self.turns:
            wrong = self.recording and number == self.fatal
            made = {"number": number, "is": "wrong" if wrong else "right"}
            return ScriptedReply(tool_calls=(ScriptedCall("step", made),))
        last_wrong = self.recording and self.fatal == self.turns
        if self.recording:
            failed = self.fatal is not None
        else:
            lost = last_wrong or any("wrong" in step for step in steps)
            failed = self._drawn.random() >= self.chances["wrong" if lost else "right"]
        return ScriptedReply("failure" if failed else "success")


class Played:
    """Sessions of a loop that costs nothing, each rewarded by its answer."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, entry: Entry | None, count: int) -> Generator[Sibling]:
        yield from asyncio.run(self._all(entry, count))

    async def _all(self, entry: Entry | None, count: int) -> list[Sibling]:
        async with Client(self.url) as client, httpx.AsyncClient(timeout=120, verify=TLS) as http:
            running = [self._one(client, http, entry) for _ in range(count)]
            return await asyncio.gather(*running)

    async def _one(self, client: Client, http: httpx.AsyncClient, entry: Entry | None) -> Sibling:
        rules = None if entry is None else {"replay": dict(entry.rules)}
        origin = None if entry is None else entry.origin
        session = await client.create_session(
            SessionRequest(
                settings=rules, origin=origin, group_id=None if entry is None else entry.group_id
            )
        )
        messages: list[Any] = [{"role": "user", "content": "go"}]
        while True:
            asked = {"model": "m", "messages": messages, "tools": TOOLS}
            reply = await http.post(
                f"{session.base_urls['openai']}/chat/completions",
                json=asked,
                headers={"authorization": f"Bearer {session.key}"},
            )
            reply.raise_for_status()
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                made = call["function"]["arguments"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": made})
        reward = float(message["content"] == "success")
        await client.reward(session.id, "reward", reward, verifier_key=session.verifier_key)
        await client.seal(session.id, "completed")
        return Sibling(session.id, reward)


def recording_of(url: str, session_id: str | None) -> Recording:
    async def load() -> Recording:
        async with Client(url) as client:
            return await Recording.load(client, session_id or "")

    return asyncio.run(load())


def examined(stage: Any, url: str, policy: Policy) -> tuple[Recording, Explanation]:
    """Record a session of a policy, and search for the turn that lost it."""
    stage.play = policy
    played = Played(url)
    (first,) = played.run(None, 1)
    policy.recording = False
    recording = recording_of(url, first.session_id)
    assert recording.reward == first.reward
    succeeded = first.reward == 1.0
    return recording, explained(recording, played, succeeded=succeeded)


def test_the_turn_that_lost_a_session_is_a_finding_with_its_re_entries(
    stage: Any, bench: Any
) -> None:
    recording, found = examined(stage, bench.url, Policy(6, 3, seed=5))
    about = finding(recording, found)
    assert about is not None

    async def write() -> bool:
        async with Client(bench.url) as client:
            return await record(client, recording, found)

    assert asyncio.run(write())
    (kept,) = [one for one in bench.reader.rewards(recording.id) if one.is_finding]
    assert (kept.name, kept.turn, kept.value) == ("lost_at_turn", 3, 1.0)
    values = {one["after_turn"]: one for one in kept.detail["values"]}
    assert values[2]["chance"] > values[3]["chance"]
    assert len(values[3]["re_entries"]) == 8
    replayed = [
        call.replayed_call_id
        for sibling in values[3]["re_entries"]
        for call in bench.reader.calls(sibling)
    ]
    assert Counter(replayed)[None] == 8 * 3, "three of six turns were asked of the engine"
    calls = bench.reader.calls(recording.id)
    counted = CountedRewards(bench.reader)
    branches = {
        one.turn: one for one in branches_of(bench.reader, recording.id, calls, counted.number)
    }
    assert branches[4].value.samples == 8
    assert branches[4].value.chance == values[3]["chance"]


def test_siblings_of_a_training_run_train_what_follows_their_branch_alone(
    stage: Any, bench: Any
) -> None:
    policy = stage.play = Policy(5, 2, seed=1)
    played = Played(bench.url)
    (first,) = played.run(None, 1)
    policy.recording = False
    branches = Branches(bench.reader, GroupsConfig(branch=0.5, branch_at="failed", size=4), 0)
    assert branches(1) is None, "no session is over"
    branches.learn(first.session_id or "", "run.0", "task", success=False)
    assert branches(0) is None, "every other group"
    planned = branches(1)
    assert planned is not None
    assert planned.task == "task"
    entry = Entry(planned.origin, group_id="run.1")
    group = list(played.run(entry, 4))
    calls = bench.reader.calls(first.session_id or "")
    place = [call.id for call in calls].index(planned.origin.call or "")
    assert place > 0
    episodes = []
    for one in group:
        audited = audit_session(bench.reader, one.session_id or "", bodies=True)
        assert audited.clean, audited.violations
        own = bench.reader.calls(one.session_id or "")
        live = sum(call.sampled_tokens or 0 for call in own if call.replayed_call_id is None)
        episode = episode_of(LoadedSession.load(bench.reader, one.session_id or ""))
        assert episode.conservation.captured == live
        assert sum(int(sample.mask.sum()) for sample in episode.samples) == live
        trained = {
            call
            for sample in episode.samples
            for number, call in enumerate(sample.call_ids)
            if bool(sample.mask[sample.calls == number].any())
        }
        assert trained == {call.id for call in own[place:]}
        episodes.append(episode)
    prefixes = {
        bytes(sample.token_ids[: int(np.flatnonzero(sample.mask)[0])])
        for episode in episodes
        for sample in episode.samples
    }
    assert len(prefixes) == 1, "the tokens before the branch are packed once"
    branches.learn(group[0].session_id or "", "run.1", "task", success=True)
    again = branches(1)
    assert again is not None
    assert again.origin.session == first.session_id, "the sibling did not fail"


def test_siblings_branch_where_the_settings_say(stage: Any, bench: Any) -> None:
    """Every ``branch_at`` is reached by its setting, and a horizon keeps to the last calls."""
    policy = stage.play = Policy(6, 2, seed=1)
    played = Played(bench.url)
    (failed,) = played.run(None, 1)
    policy.fatal = None
    (passed,) = played.run(None, 1)
    calls = {one: bench.reader.calls(one.session_id) for one in (failed, passed)}

    def drawn(where: Where, **more: Any) -> set[tuple[str, int]]:
        config = GroupsConfig(branch=1.0, branch_at=where, size=4)
        branches = Branches(bench.reader, config, 0, **more)
        for one in (failed, passed):
            branches.learn(one.session_id or "", "run.0", "task", success=one is passed)
        found = set()
        for number in range(60):
            planned = branches(number)
            assert planned is not None
            one = failed if planned.origin.session == failed.session_id else passed
            place = [call.id for call in calls[one]].index(planned.origin.call or "")
            assert branches.calls_before(planned.origin) == place
            found.add(("failed" if one is failed else "passed", place))
        return found

    every = {(how, place) for how in ("failed", "passed") for place in range(1, 6)}
    assert drawn("random") == drawn("entropy") == drawn("value") == every
    assert drawn("failed") == {one for one in every if one[0] == "failed"}
    late = {one for one in every if one[1] >= 4}
    assert drawn("random", horizon=lambda _number: 2) == late


@pytest.mark.replay
def test_planted_turns_of_recorded_sessions_are_found(stage: Any, bench: Any) -> None:
    drawn, right, spent, most = random.Random(7), 0, 0, 0
    for seed in range(SESSIONS):
        turns = drawn.randint(4, 10)
        fatal = drawn.randint(1, turns - 1)
        _, found = examined(stage, bench.url, Policy(turns, fatal, seed))
        right += found.lost is not None and found.lost.turn == fatal
        spent += found.spent
        most = max(most, *map(len, found.tried.values()))
    accused = 0
    healthy = -(-SESSIONS // 5)
    for seed in range(healthy):
        _, found = examined(stage, bench.url, Policy(drawn.randint(4, 10), None, seed))
        accused += found.lost is not None
    print(
        f"\nfound {right} of {SESSIONS} planted turns; {spent / SESSIONS:.1f} re-entries a "
        f"session, at most {most} after a turn; accused {accused} of {healthy} healthy sessions"
    )
    assert most <= 8
    assert right == SESSIONS
    assert accused == 0
