"""Programs that nobody here wrote judge the proxy: suites of rules, official SDKs, frameworks.

Each folder of ``judges`` is an environment of its own (``tests/referees/install``), and each of its
files runs there. What fails is mended, or ``verdicts.toml`` names the reason why it is the judge's
fault.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.engine.vllm import VllmOptions, VllmServer
from bridle.engine.vllm.installation import VllmError, find_installation
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.packages import cache_directory
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.selection import Selection
from bridle.store.call import CallRow
from bridle.store.reading.queries import Reader

pytestmark = pytest.mark.referees

HERE = Path(__file__).parent
JUDGES = HERE / "judges"
CHOSEN = os.environ.get("BRIDLE_REFEREES", "").split() or ["*"]
"""Names of the folders whose judges run."""
FILES = {
    file.stem.removeprefix("judge_"): file
    for folder in CHOSEN
    for file in sorted(JUDGES.glob(f"{folder}/judge_*.*"))
}
TAILS = runpy.run_path(str(HERE / "tails.py"))
BY_HEART = runpy.run_path(str(HERE / "by_heart.py"))
CORNERS = runpy.run_path(str(HERE / "harbor_corners.py"))
INTERPRETER = runpy.run_path(str(HERE.parent / "pythons.py"))["interpreter"]
PYTHONS = {
    judge: needed.read_text().strip()
    for judge, file in FILES.items()
    if (needed := file.with_name("python")).exists()
}
MISSING = {judge: version for judge, version in PYTHONS.items() if INTERPRETER(version) is None}
"""The Python that a judge needs and this machine lacks."""
JUDGED = tomllib.loads((HERE / "verdicts.toml").read_text())
VERDICTS, REWORDS = JUDGED["theirs"], JUDGED["rewords"]
MATERIAL = cache_directory()
"""The user's own cache, read before the tests hide it: what was fetched is kept between runs."""
TEXTS = ["What is two and two? The answer is four. I look that up."] * 20
"""The text from which the tokenizer is made."""
EXACTLY = re.compile(r"Say exactly: (.*)")


def value_of(schema: Mapping[str, object] | None) -> object:
    """Return a value that a JSON schema allows."""
    given: Mapping[str, object] = schema or {}
    properties = given.get("properties")
    if isinstance(properties, Mapping):
        return {name: value_of(part) for name, part in properties.items()}
    plain: dict[object, object] = {"object": {}, "array": [], "integer": 3, "boolean": True}
    return plain.get(given.get("type"), "Paris")


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def script(request: ScriptedRequest) -> ScriptedReply:
    """Call every tool, in parallel, and answer when the results are there."""
    last = request.messages[-1] if request.messages else {"role": "user", "content": ""}
    if wanted := EXACTLY.search(text_of(last)):
        return ScriptedReply(wanted[1], reasoning="As asked.")
    if request.tools and last["role"] != "tool":
        functions = [tool["function"] for tool in request.tools]
        calls = [
            ScriptedCall(one["name"], value_of(one.get("parameters")))  # type: ignore[arg-type]
            for one in functions
        ]
        return ScriptedReply(reasoning="I look that up.", tool_calls=calls)
    return ScriptedReply("The answer is four.", reasoning="Two and two.")


@dataclass(frozen=True)
class Proxy:
    """A running proxy: its address, its store's and its tokenizer's directory."""

    url: str
    store: str
    model: Path


@contextmanager
def proxy_of(engine: ScriptedEngine | VllmServer, model: Path, store_name: str) -> Iterator[Proxy]:
    """Serve a proxy in front of an engine, with its store beside the model's directory."""
    store = f"sqlite:///{model.parent}/{store_name}"
    with ProxyServer(
        ProxySettings(engine.base_url, store, tokenizer_dir=model), grace_s=1
    ) as server:
        yield Proxy(server.base_url, store, model)


@pytest.fixture(scope="module")
def proxy(
    tmp_path_factory: pytest.TempPathFactory, audit_store: Callable[[Path], None]
) -> Iterator[Proxy]:
    """A proxy in front of a scripted engine that thinks and calls.

    What the judges leave in its store is audited, and every conversation is one line of calls.
    """
    model = tmp_path_factory.mktemp("referees") / "model"
    model.mkdir()
    train_tokenizer(model, TEXTS)
    with (
        ScriptedEngine(model, script, served_model_name="policy") as engine,
        proxy_of(engine, model, "bridle.db") as running,
    ):
        yield running
    audit_store(model.with_name("bridle.db"))
    with Reader(running.store) as reader:
        rows = [call for session in reader.sessions() for call in reader.calls(session.id)]
    assert not [call.break_reason for call in rows if call.break_reason and not rewords(call)]
    assert "reply_dropped" not in {note.name for call in rows for note in call.notes}


def rewords(call: CallRow) -> bool:
    """Return whether a verdict names the client of a broken call as one that rewrites its turns."""
    verdicts = [one for one in REWORDS if one["client"] in str(call.headers)]
    return any(call.break_reason == one["break"] for one in verdicts)


def command(file: Path, report: Path) -> list[str | Path]:
    """Return the command that runs a judge in its environment, which writes its report."""
    if file.suffix == ".mjs":
        (node,) = file.parent.glob("node_modules/node-*/bin/node")
        reporter = f"--test-reporter={file.parent / 'report.mjs'}"
        return [node, reporter, f"--test-reporter-destination={report}", file]
    alone = ["-c", os.devnull, f"--rootdir={JUDGES}", f"--confcutdir={JUDGES}"]
    # The first test of each format that llm-comply knows runs all of its tests.
    limit_s = 600 if file.stem == "judge_comply" else 60
    rules = ["-q", f"--timeout={limit_s}", "-p", "no:cacheprovider"]
    if file.parent.name == "rules":
        rules += ["-W", "error"]  # Warnings of the official SDKs; frameworks warn of themselves.
    waiting = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    python = file.parent / ".venv" / "bin" / "python"
    return [python, "-m", "pytest", *alone, *rules, *waiting, file]


def inputs(judge: str, proxy: Proxy, file: Path) -> Path:
    """Return the path of what a judge reads besides the proxy's replies."""
    if judge == "aiperf":
        return proxy.model
    if judge == "renderers":
        TAILS["write"](file, MATERIAL)
    if judge == "harbor":
        CORNERS["write"](file)
    if (form := {"atif": "atif", "trace": "replay"}.get(judge)) is not None:
        with Reader(proxy.store) as reader:
            export(reader, file.with_suffix(".jsonl"), form, Selection())
        return file.with_suffix(".jsonl")
    return file


def failures(judge: str, proxy: Proxy, report: Path) -> dict[str, str]:
    """Run a judge. Return the message of each test, empty for one that passed."""
    file = FILES[judge]
    if judge in MISSING:
        pytest.skip(f"{judge} needs Python {MISSING[judge]}, which is not installed here")
    if not any(file.parent.glob("*/.installed")):
        pytest.fail(f"run `tests/referees/install {file.parent.name}` first")
    environment = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
    environment |= {"BRIDLE_REFEREES_URL": proxy.url, "NO_PROXY": "*"}
    environment["BRIDLE_REFEREES_REPORT"] = str(report)
    environment["BRIDLE_REFEREES_INPUTS"] = str(inputs(judge, proxy, report.with_name("inputs")))
    environment["TIKTOKEN_ENCODINGS_BASE"] = str(report.parent)
    ran = subprocess.run(
        command(file, report),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=report.parent,
    )
    print(ran.stdout, ran.stderr)
    assert report.exists(), "the judge did not run"
    return dict(json.loads(line) for line in report.read_text().splitlines())


def assert_judged(judge: str, messages: Mapping[str, str], engine: str = "scripted") -> None:
    """Check that verdicts explain every failure on an engine, and that each verdict is needed."""
    verdicts = [
        verdict
        for verdict in VERDICTS
        if verdict["judge"] == judge and engine in verdict.get("engines", ["scripted"])
    ]
    needed, ours = set(), []
    assert messages, "the judge has no tests"
    for test, message in messages.items():
        for line in filter(None, message.splitlines()):
            theirs = [
                number
                for number, verdict in enumerate(verdicts)
                if re.search(verdict["test"], test) and re.search(verdict["error"], line)
            ]
            needed.update(theirs)
            if not theirs:
                ours.append(f"{test}: {line}")
    failed = sum(map(bool, messages.values()))
    print(f"{judge}: {len(messages) - failed} of {len(messages)} passed, {failed} failed")
    assert not ours, "\n".join(ours)
    stale = [verdict for number, verdict in enumerate(verdicts) if number not in needed]
    assert not stale, f"these pass, so remove their verdicts: {stale}"


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("judge", FILES)
def test_the_judge_fails_nothing_but_what_is_its_own_fault(
    judge: str, proxy: Proxy, tmp_path: Path
) -> None:
    assert_judged(judge, failures(judge, proxy, tmp_path / "report.jsonl"))


@pytest.mark.timeout(2400)
@pytest.mark.skipif("comply" not in FILES, reason="BRIDLE_REFEREES leaves llm-comply out")
def test_replies_of_a_real_vllm_follow_the_providers_rules(
    tmp_path: Path, audit_store: Callable[[Path], None]
) -> None:
    """The policy knows the scripted replies by heart, so that it thinks, calls and ends."""
    try:
        find_installation()
    except VllmError as error:
        pytest.skip(str(error))
    model = tmp_path / "model"
    model.mkdir()
    train_tokenizer(model, TEXTS)
    with ScriptedEngine(model, script) as scripted, proxy_of(scripted, model, "asked.db") as asked:
        failures("comply", asked, tmp_path / "asked.jsonl")
        BY_HEART["learn"](model, scripted.requests, script)
    options = VllmOptions(cpu_kv_cache_gib=1, version=0)
    with (
        VllmServer(model, tmp_path / "vllm", options=options) as engine,
        proxy_of(engine, model, "bridle.db") as served,
    ):
        messages = failures("comply", served, tmp_path / "report.jsonl")
    assert_judged("comply", messages, "vllm")
    audit_store(tmp_path / "bridle.db")
