"""Programs that nobody here wrote judge the proxy: suites of rules, official SDKs, frameworks.

Each file of ``judges`` runs in an environment of its own (``make test-referees``). What fails there
is mended, or ``verdicts.toml`` names the reason why it is the judge's fault.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from bridle.bench.packages import cache_directory
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.reading.queries import Reader

pytestmark = pytest.mark.referees

HERE = Path(__file__).parent
TAILS = runpy.run_path(str(HERE / "tails.py"))
JUDGES = sorted(file.stem.removeprefix("judge_") for file in HERE.glob("judges/judge_*.py"))
VERDICTS = tomllib.loads((HERE / "verdicts.toml").read_text())["theirs"]
MATERIAL = cache_directory()
"""The user's own cache, read before the tests hide it: what was fetched is kept between runs."""
EXACTLY = "Say exactly: "


def value_of(schema: Mapping[str, object] | None) -> object:
    """Return a value that a JSON schema allows."""
    given: Mapping[str, object] = schema or {}
    properties = given.get("properties")
    if isinstance(properties, Mapping):
        return {name: value_of(part) for name, part in properties.items()}
    plain: dict[object, object] = {"object": {}, "array": [], "integer": 3, "boolean": True}
    return plain.get(given.get("type"), "Paris")


def script(request: ScriptedRequest) -> ScriptedReply:
    """Call every tool, in parallel, and answer when the results are there."""
    last = request.messages[-1] if request.messages else {"role": "user", "content": ""}
    text = last.get("content")
    if isinstance(text, str) and text.startswith(EXACTLY):
        return ScriptedReply(text.removeprefix(EXACTLY), reasoning="As asked.")
    if request.tools and last["role"] != "tool":
        functions = [tool["function"] for tool in request.tools]
        calls = [
            ScriptedCall(one["name"], value_of(one.get("parameters")))  # type: ignore[arg-type]
            for one in functions
        ]
        return ScriptedReply(reasoning="I look that up.", tool_calls=calls)
    return ScriptedReply("The answer is four.", reasoning="Two and two.")


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory, audit_store: Callable[[Path], None]
) -> Iterator[str]:
    """The address of a proxy in front of a scripted engine that thinks and calls.

    What the judges leave in its store is audited, and every conversation is one line of calls.
    """
    folder = tmp_path_factory.mktemp("referees")
    model = folder / "model"
    model.mkdir()
    train_tokenizer(model, ["What is two and two? The answer is four. I look that up."] * 20)
    with ScriptedEngine(model, script, served_model_name="policy") as engine:
        store = f"sqlite:///{folder}/bridle.db"
        settings = ProxySettings(engine.base_url, store, tokenizer_dir=model)
        server = ProxyServer(settings, grace_s=1)
        server.start()
        yield server.base_url
        server.stop()
    audit_store(folder / "bridle.db")
    with Reader(store) as reader:
        rows = [call for session in reader.sessions() for call in reader.calls(session.id)]
    assert not [call.break_reason for call in rows if call.break_reason]
    assert "reply_dropped" not in {note.name for call in rows for note in call.notes}


def failures(judge: str, url: str, report: Path) -> dict[str, str]:
    """Run a judge; return the message of each test, empty for one that passed."""
    python = os.environ.get("BRIDLE_REFEREES_PYTHON")
    if python is None:
        pytest.fail("BRIDLE_REFEREES_PYTHON is not set: run `make test-referees`")
    file = HERE / "judges" / f"judge_{judge}.py"
    alone = ["-c", os.devnull, f"--rootdir={file.parent}", f"--confcutdir={file.parent}"]
    rules = ["-q", "-W", "error", "--timeout=60", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", *alone, *rules, file]
    environment = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
    environment |= {"BRIDLE_REFEREES_URL": url, "NO_PROXY": "*"}
    environment["BRIDLE_REFEREES_REPORT"] = str(report)
    if judge == "renderers":
        environment["BRIDLE_REFEREES_TAILS"] = str(report.with_name("tails.json"))
        TAILS["write"](report.with_name("tails.json"), MATERIAL)
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=report.parent
    )
    print(ran.stdout, ran.stderr)
    assert report.exists(), "the judge did not run"
    return dict(json.loads(line) for line in report.read_text().splitlines())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("judge", JUDGES)
def test_the_judge_fails_nothing_but_what_is_its_own_fault(
    judge: str, url: str, tmp_path: Path
) -> None:
    verdicts = [verdict for verdict in VERDICTS if verdict["judge"] == judge]
    needed, ours = set(), []
    found = failures(judge, url, tmp_path / "report.jsonl")
    assert found, "the judge has no tests"
    for test, message in found.items():
        for line in filter(None, message.splitlines()):
            theirs = [
                number
                for number, verdict in enumerate(verdicts)
                if re.search(verdict["test"], test) and re.search(verdict["error"], line)
            ]
            needed.update(theirs)
            if not theirs:
                ours.append(f"{test}: {line}")
    assert not ours, "\n".join(ours)
    stale = [verdict for number, verdict in enumerate(verdicts) if number not in needed]
    assert not stale, f"these pass, so remove their verdicts: {stale}"
