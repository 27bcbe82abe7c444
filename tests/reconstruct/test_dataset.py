"""The Python API, and the queries of docs/data.md as they are written there."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import bridle
from bridle.reconstruct import open_store
from bridle.reconstruct.exports.formats import NoFormat
from bridle.reconstruct.notebook import COLUMNS, TURNS, PandasMissing
from bridle.store.errors import NotFound
from bridle.store.records import Message
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


def test_a_listing_becomes_a_frame_with_a_row_for_each_session(opened, agent):
    frame = opened.sessions().to_pandas()
    assert frame["id"].tolist() == [session.id for session in opened.sessions()]
    assert frame["harness"].tolist()[1] == "pi"
    assert frame["reward"].iloc[0] == frame["reward.reward"].iloc[0] == 0.1 + 0.2
    assert np.isnan(frame["reward.reward"].iloc[1])
    for row, session in zip(frame.itertuples(), opened.sessions(), strict=True):
        assert (row.calls, row.sampled_tokens) == (len(session.calls), session.captured)
    empty = opened.sessions(harness="none").to_pandas()
    assert list(empty.columns) == list(COLUMNS)
    assert empty.empty


def test_a_frame_without_pandas_names_what_installs_it(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PandasMissing, match="pip install pandas"):
        opened.sessions().to_pandas()


def test_a_notebook_shows_a_session_in_short_and_escaped(url, record, reader):
    recording = record(name="<b>name</b>", harness="<i>")
    for _ in range(TURNS + 2):
        recording.call([1], [5], replies=[Message("assistant", "<script>" + "x " * 500)])
    with open_store(url) as store:
        shown = store.session(recording.id)._repr_html_()
    assert "&lt;b&gt;name&lt;/b&gt;" in shown
    assert "&lt;script&gt;" in shown
    assert not {"<script", "<b>name", "<i>"} & set(re.findall(r"<\w+[^>]*>?", shown))
    assert shown.count("<tr>") == TURNS + 1
    assert "2 more turns" in shown
    assert len(shown) < 10_000


def test_export_writes_the_file_and_its_card(opened, url, tmp_path):
    report = opened.export(tmp_path / "all.parquet")
    assert (report.sessions, report.rows) == (2, opened.samples_table().num_rows)
    assert pq.read_table(tmp_path / "all.parquet").num_rows == report.rows
    card = json.loads((tmp_path / "all.parquet.card.json").read_text())
    assert card["counts"]["rows"] == report.rows
    one = bridle.export(tmp_path / "one.parquet", store=url, harness="pi")
    assert one.sessions == 1


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [("x.txt", None, "names no format"), ("x.jsonl", "tokens", "written as .parquet")],
)
def test_export_refuses_a_name_that_fits_no_format(opened, tmp_path, name, form, words):
    with pytest.raises(NoFormat, match=words):
        opened.export(tmp_path / name, form)
    assert not (tmp_path / name).exists()


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


def test_the_queries_of_the_page_run(opened, url, agent, reader, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BRIDLE_STORE", url)
    text = PAGE.read_text().split("## Exports")[0]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 8
    names = {}
    for block in blocks:
        exec(block, names)  # noqa: S102 - the page's own code
    assert len(names["listing"]) == 2
    assert (names["report"].sessions, (tmp_path / "good.parquet").exists()) == (0, True)
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
