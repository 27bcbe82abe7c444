"""The Python API, and the queries of docs/data.md as they are written there."""

import re
from pathlib import Path

import numpy as np
import pytest

from bridle.reconstruct import open_store
from bridle.store.errors import NotFound
from bridle.store.reward import Reward, RewardSource

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture
def opened(url, record, writer, agent):
    writer.add_sync(Reward(agent.id, "reward", 0.1 + 0.2, 1.0, source=RewardSource.VERIFIER))
    other = record(name="other", harness="pi", labels={"seed": 3})
    call = other.call([1], [5])
    writer.add_sync(
        Reward(other.id, "reward", 0.5, 1.0, call_id=call, source=RewardSource.VERIFIER)
    )
    with open_store(url) as store:
        yield store


def test_sessions_are_typed_objects_down_to_their_tokens(opened, agent, reader):
    first, second = opened.sessions()
    assert (first.id, second.record.name) == (agent.id, "other")
    assert first.rewards == {"reward": 0.1 + 0.2}
    assert (second.rewards, second.reward()) == ({}, None)
    assert first.tree.prompt(first.calls[0]).tolist() == [1, 2, 3, 10]
    assert first.request(first.calls[0]) == b"[1, 2, 3, 10]"
    assert first.response(first.calls[0]) == first.calls[0].id.encode()
    assert len(first.samples()) == 5
    assert len(first.samples(builder="per_call")) == 8
    assert first.audit(bodies=True).clean
    assert opened.session("other").id == second.id
    with pytest.raises(NotFound):
        opened.session("nonesuch")


def test_a_session_is_of_one_moment_and_gives_every_token_of_that(url, record):
    recording = record()
    first = recording.call([1], [5, 6])
    with open_store(url) as store:
        before = store.session(recording.id)
        recording.call([1, 5, 6, 2], [7], parent=first)
        after = store.session(recording.id)
        for session, calls, tokens in ((before, 1, [5, 6]), (after, 2, [5, 6, 7])):
            assert len(session.calls) == calls
            built = session.build()
            assert [s.token_ids[s.mask].tolist() for s in built.samples] == [tokens]
            assert built.conservation.dropped == {}


def test_the_table_of_samples_holds_what_the_objects_hold(opened):
    samples = opened.samples_table()
    assert samples.num_rows == 6
    expected = [s.logprobs for session in opened.sessions() for s in session.samples()]
    for found, logprobs in zip(samples["logprobs"].to_pylist(), expected, strict=True):
        assert np.float32(found).tobytes() == logprobs.tobytes()
    assert opened.samples_table(builder="per_call").num_rows == 9
    assert set(samples["reward.reward"].to_pylist()) == {0.1 + 0.2, None}


def test_sql_takes_values_and_gives_a_table(opened, agent):
    found = opened.query("SELECT count(*) AS n FROM calls WHERE session_id = :id", id=agent.id)
    assert found.to_pydict() == {"n": [9]}


def test_looking_for_a_store_makes_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_store(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


def test_the_queries_of_the_page_run(opened, url, agent, reader, capsys, monkeypatch):
    monkeypatch.setenv("BRIDLE_STORE", url)
    text = PAGE.read_text().split("## Exports")[0]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 7
    names = {}
    for block in blocks:
        exec(block, names)  # noqa: S102 - the page's own code
    assert names["solved"].set_index("harness")["rewards"].to_dict()["pi"] == 0
    assert names["breaks"].to_pydict() == {"reason": ["none"], "calls": [10]}
    assert {version: sum(map(len, found)) for version, found in names["per_version"].items()} == {
        1: 6,
        2: 6,
        3: 2,
    }
    assert [value for value, _ in names["ranked"]] == [0.5, 0.1 + 0.2]
    assert "complete" in capsys.readouterr().out
    best = names["session"]
    assert reader.calls(best.id)[0].kind_by == "me"
    assert [reward.value for reward in reader.rewards(best.id)][-1] == 0.5
    names["store"].close()
