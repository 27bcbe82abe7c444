"""``bridle doctor`` names what is broken, and what the template does."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result

from bridle.engine.contract.contract import MISSING_LOGPROB
from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.schema.database import migrate

Bridle = Callable[..., Result]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A tiny policy's directory, and the URL of an engine that serves it."""
    directory = tmp_path_factory.mktemp("doctor") / "policy"
    size = train_tokenizer(directory, ["what ails it and what does not"] * 4, vocab_size=320)
    shape = TinyShape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, context=512)
    make_policy(directory, shape, vocab_size=size, seed=3)
    with EmbeddedEngine(directory) as engine:
        yield directory, engine.base_url


def test_everything_in_place_is_said_in_words(
    bridle: Bridle, policy: tuple[Path, str], store: str
) -> None:
    model, url = policy
    result = bridle("doctor", "--model", model, "--upstream", url, "--store", store)
    assert result.exit_code == 0, result.output
    assert "history is prefix-preserving: yes" in result.output
    assert "tails are local: yes" in result.output
    assert "ok      exact continuation  " in result.output
    assert "newest schema" in result.output


def test_an_engine_with_another_tokenizer_is_broken(
    bridle: Bridle, policy: tuple[Path, str], store: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    train_tokenizer(other, ["quite another language altogether"] * 4, vocab_size=300)
    ours = bridle("doctor", "--model", policy[0], "--upstream", policy[1], "--store", store)
    assert "the engine makes the same ids" in ours.output
    told = bridle("doctor", "--model", other, "--upstream", policy[1], "--store", store)
    assert told.exit_code == 1
    assert "BROKEN  tokenizer" in told.output
    assert str(other) in told.output


def test_json_carries_the_whole_verdict(
    bridle: Bridle, policy: tuple[Path, str], store: str
) -> None:
    model, url = policy
    result = bridle("doctor", "--model", model, "--upstream", url, "--store", store, "--json")
    found = json.loads(result.output)
    assert found["broken"] == []
    outcomes = {check["name"]: check["outcome"] for check in found["engine"]["checks"]}
    for name in ("token ids", "streamed token ids", "exact continuation", "logprobs mode"):
        assert outcomes[name] == "ok"
    assert found["store"]["migrated"]
    assert found["template"]["thinking"] == "kept"
    assert found["template"]["arguments_reserialised"]
    assert found["template"]["tool_markup"] == found["template"]["tool_parser"] == "hermes"
    assert found["template"]["embedded_reads_calls"]


@pytest.mark.parametrize(
    ("opening", "line"),
    [
        ("<|tool_call_start|>", "tool calls: lfm2, read by vLLM (lfm2) only; elsewhere calls stay"),
        (
            "<TOOLCALL>",
            "tool calls: nemotron_v2, read by vLLM (bridle_nemotron_v2) and the embedded engine",
        ),
        ("", "tool calls: none in this template"),
    ],
)
def test_markup_that_an_engine_does_not_read_is_named(
    bridle: Bridle, model_dir: Path, store: str, tmp_path: Path, opening: str, line: str
) -> None:
    model = shutil.copytree(model_dir, tmp_path / "model")
    source = "{% for m in messages %}{{ m.role }} {{ m.content }}{% for c in m.tool_calls %}"
    source += f"{opening}{{{{ c.function.name }}}}" if opening else ""
    source += "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    (model / "chat_template.jinja").write_text(source)
    assert line in bridle("doctor", "--model", model, "--store", store).output


def test_an_engine_that_is_not_there_is_broken(bridle: Bridle, store: str) -> None:
    result = bridle("doctor", "--upstream", "http://127.0.0.1:9", "--store", store)
    assert result.exit_code == 1
    assert "is an engine running at http://127.0.0.1:9?" in result.output


def test_a_scripted_engine_is_in_order(bridle: Bridle, model_dir: Path, store: str) -> None:
    """The engine of the first recording has no sampler that could be examined."""
    with ScriptedEngine(model_dir, lambda _: ScriptedReply("four")) as engine:
        result = bridle("doctor", "--upstream", engine.base_url, "--store", store)
    assert result.exit_code == 0, result.output
    assert "a scripted engine plays" in result.output
    assert "unknown logprobs mode" in result.output
    assert "serve with" not in result.output


def test_an_engine_without_logprobs_is_broken(bridle: Bridle, model_dir: Path, store: str) -> None:
    with ScriptedEngine(
        model_dir, lambda _: ScriptedReply("four", logprob=MISSING_LOGPROB)
    ) as engine:
        result = bridle("doctor", "--upstream", engine.base_url, "--store", store)
    assert result.exit_code == 1
    assert "a sampled token has no logprob: upgrade vLLM" in result.output


def test_a_directory_without_a_tokenizer_is_broken(
    bridle: Bridle, store: str, tmp_path: Path
) -> None:
    result = bridle("doctor", "--model", tmp_path, "--store", store)
    assert result.exit_code == 1
    assert f"no tokenizer in {tmp_path}" in result.output


def test_a_directory_that_is_not_there_is_named(bridle: Bridle, store: str, tmp_path: Path) -> None:
    missing = tmp_path / "nope"
    result = bridle("doctor", "--model", missing, "--store", store)
    assert result.exit_code == 2
    assert "Invalid value for '--model'" in result.output
    assert "nor a name on the Hub (OWNER/MODEL)" in " ".join(
        result.output.replace("│", " ").split()
    )


@pytest.mark.parametrize("path", ["", "/v1"])
def test_a_proxy_of_ours_is_no_engine(
    bridle: Bridle, proxy_url: str, store: str, path: str
) -> None:
    result = bridle("doctor", "--upstream", f"{proxy_url}{path}", "--store", store)
    assert result.exit_code == 1
    assert f"{proxy_url} is a Bridle proxy, not an engine" in result.output


def test_a_directory_without_a_template_is_broken(
    bridle: Bridle, store: str, tmp_path: Path, model_dir: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    result = bridle("doctor", "--model", tmp_path, "--store", store)
    assert result.exit_code == 1
    assert "has no chat template" in result.output


def test_a_store_of_another_schema_is_broken_and_one_not_there_yet_is_not(
    bridle: Bridle, tmp_path: Path
) -> None:
    old = str(tmp_path / "old.db")
    migrate(old)
    with closing(sqlite3.connect(old)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0000'")
    assert bridle("doctor", "--store", old).exit_code == 1
    fresh = tmp_path / "fresh.db"
    assert bridle("doctor", "--store", fresh).exit_code == 0
    assert not fresh.exists()
    (tmp_path / "text.db").write_text("this is no database, " * 100)
    assert "is no database" in bridle("doctor", "--store", tmp_path / "text.db").output


def test_the_orders_of_roles_that_a_template_refuses_are_listed(
    bridle: Bridle, policy: tuple[Path, str], store: str, tmp_path: Path
) -> None:
    taken = bridle("doctor", "--model", policy[0], "--store", store)
    assert "roles: sent as they are" in taken.output
    strict = tmp_path / "strict"
    template = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('only the first') }}{%- endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    train_tokenizer(strict, ["what ails it"] * 4, vocab_size=320, template=template)
    told = bridle("doctor", "--model", strict, "--store", store)
    assert "roles: several leading system messages are refused" in told.output
    found = json.loads(bridle("doctor", "--model", strict, "--store", store, "--json").output)
    assert found["template"]["roles"]["late_system"] is False
    assert found["template"]["roles"]["users_in_a_row"] is True


@pytest.mark.parametrize(
    ("template", "works"),
    [("qwen3_5_think", True), ("gemma3", False), ("deepseek_r1_distill", False)],
)
def test_whether_a_harness_can_work_on_a_template_is_said_before_it_starts(
    bridle: Bridle,
    policy: tuple[Path, str],
    store: str,
    tmp_path: Path,
    template: str,
    works: bool,
) -> None:
    trl = pytest.importorskip("trl")
    model = tmp_path / "model"
    shutil.copytree(policy[0], model)
    source = Path(str(trl.__file__)).parent / "chat_templates" / f"{template}.jinja"
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = source.read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    found = bridle("doctor", "--model", model, "--harness", "codex", "--store", store)
    assert found.exit_code == (0 if works else 1), found.output
    assert ("ok      harness" if works else "BROKEN  harness") in found.output


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--harness", "cdx"], "claude-code, codex"), (["--harness", "codex"], "--model")],
)
def test_a_pair_that_is_not_one_is_refused_with_the_remedy(
    bridle: Bridle, store: str, options: list[str], named: str
) -> None:
    refused = bridle("doctor", *options, "--store", store)
    assert refused.exit_code != 0
    assert named in refused.output
