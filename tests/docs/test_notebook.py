"""The notebook of the examples runs from top to bottom over a store that was really recorded."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.run.examples import example_directory
from bridle.store.reading.queries import Reader
from bridle.store.reward import Reward
from bridle.store.writing.writer import Writer

nbclient = pytest.importorskip("nbclient", reason="make docs installs it")
nbformat = pytest.importorskip("nbformat", reason="make docs installs it")

pytestmark = pytest.mark.docs

NOTEBOOK = example_directory("sessions_to_sft") / "notebook.ipynb"
AGENT = example_directory("openai_sdk") / "agent.py"
REWARDS = {"Oslo": 1.0, "Rome": 0.0, "Berlin": 1.0}


def weather_report(request: ScriptedRequest) -> ScriptedReply:
    """Asks the tool once, and repeats what it said."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return ScriptedReply(f"There is {last['content']}.")
    city = next(city for city in REWARDS if city in str(last["content"]))
    return ScriptedReply(tool_calls=(ScriptedCall("weather", {"city": city}),))


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Three sessions of the example's agent, two of them with the best reward."""
    model, path = tmp_path / "model", str(tmp_path / "bridle.db")
    train_tokenizer(model, ["What is the weather in Oslo? There is snow."] * 20, vocab_size=400)
    with (
        ScriptedEngine(model, weather_report, served_model_name="policy") as engine,
        ProxyServer(ProxySettings(engine.base_url, path, tokenizer_dir=model)) as proxy,
    ):
        for city in REWARDS:
            base = {"OPENAI_BASE_URL": f"{proxy.base_url}/s/{city}/v1", "OPENAI_API_KEY": "unused"}
            asked = [sys.executable, str(AGENT), f"What is the weather in {city}?"]
            subprocess.run(asked, env=os.environ | base, check=True, stdout=subprocess.DEVNULL)
    with Reader(path) as reader, Writer(path) as writer:
        for session in reader.sessions():
            value = REWARDS[str(session.name)]
            writer.add_sync(Reward(session.id, "reward", value, time.time()))
    return path


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    return "".join(output.text for output in outputs if output.output_type == "stream")


def drawn(notebook: Any) -> list[bytes]:
    """The pictures that the cells show, as PNG."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.data["image/png"] for output in outputs if output.output_type == "display_data"]
    return [base64.b64decode(picture) for picture in shown]


def test_the_notebook_leads_from_a_store_to_an_sft_set(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_STORE", store)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=place).execute()
    text = printed(notebook)
    assert "3 sessions, 6 calls" in text
    (picture,) = drawn(notebook)
    (tmp_path / "plot.png").write_bytes(picture)
    pixels = matplotlib.image.imread(tmp_path / "plot.png")[..., :3].reshape(-1, 3)
    for reward in set(REWARDS.values()):
        colour = np.asarray(matplotlib.colormaps["viridis"](reward)[:3])
        assert (np.abs(pixels - colour).max(axis=1) < 0.01).sum() > 1000, "a bar of this reward"
    assert "calls weather" in text
    assert "trained" in text
    assert "2 rows in sft.jsonl" in text
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    asked = {row["messages"][0]["content"] for row in rows}
    assert asked == {"What is the weather in Oslo?", "What is the weather in Berlin?"}
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
