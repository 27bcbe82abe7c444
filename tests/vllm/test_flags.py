"""Test which command line follows from which model and options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as BackendTokenizer

from bridle.engine.vllm import VllmError, VllmOptions
from bridle.engine.vllm.flags import command, environment
from bridle.engine.vllm.installation import Installation, version_tuple
from bridle.engine.vllm.parsers import Parsers, choose_parsers
from bridle.recipes.models.tiny_tokenizer import CHATML_TOOLS_TEMPLATE

CPU = Installation(Path("/venv/bin/python"), "0.32.0", cpu=True)
GPU = Installation(Path("/venv/bin/python"), "0.32.0", cpu=False)


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def template(model_dir: Path, source: str) -> Parsers:
    (model_dir / "chat_template.jinja").write_text(source)
    return choose_parsers(model_dir)


CALLS = """{{ tools }}{% for message in messages %}{{ message.content }}
{%- for call in message.tool_calls %}OPEN{{ call.function.name }}SEP
{{- call.function.arguments | tojson }}{% endfor %}{% endfor %}"""


def calls(opening: str, separator: str = "") -> str:
    """A template that writes each call's name and arguments behind ``opening``."""
    return CALLS.replace("OPEN", opening).replace("SEP", separator)


@pytest.mark.parametrize(
    ("source", "tool", "reasoning"),
    [
        (CHATML_TOOLS_TEMPLATE, "hermes", "bridle_thinking"),
        (calls("<tool_call>"), "hermes", None),
        (calls("<tool_call>\n<function="), "qwen3_coder", None),
        (calls("<tool_call>", "<arg_key>"), "glm45", None),
        (calls("[TOOL_CALLS]", "[ARGS]"), "mistral", None),
        (calls("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), "deepseek_v31", None),
        (calls(" of a shape unheard of "), None, None),
        ("{{ tools }} calls look like <tool_call>", "hermes", None),
        ("{{ tools.never() }} <｜tool▁sep｜> ```json", "deepseek_v3", None),
        ("{% if no %} <think> {% endif %}", None, "bridle_thinking"),
        ("{{ messages[0].content }}<think>\n", None, "bridle_thinking_open"),
    ],
)
def test_parsers_follow_what_the_template_writes(
    model_dir: Path, source: str, tool: str | None, reasoning: str | None
) -> None:
    assert template(model_dir, source) == Parsers(tool, reasoning)


@pytest.mark.parametrize(
    ("source", "reasoning"),
    [
        ("{{ messages[0].content }}<think>\n", "qwen3"),
        ("{% if enable_thinking %} <think> {% endif %}", "qwen3"),
        ("{% if no %} <think> {% endif %}", "bridle_thinking"),
    ],
)
def test_vllms_own_parser_is_chosen_where_the_tag_is_a_token_and_replies_begin_inside(
    model_dir: Path, source: str, reasoning: str
) -> None:
    backend = BackendTokenizer.from_file(str(model_dir / "tokenizer.json"))
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(model_dir / "tokenizer.json"))
    assert template(model_dir, source) == Parsers(None, reasoning)


@pytest.mark.parametrize(
    ("source", "tool"),
    [
        (("<function=", ">"), "bridle_functionary"),
        (('<TOOLCALL>[{"name": "', '", '), "bridle_nemotron_v2"),
        (("[TOOL_CALLS]", "[CALL_ID]abcdefgh1[ARGS]"), "bridle_mistral"),
        (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    ],
)
def test_markup_that_vllm_does_not_read_has_a_parser_of_ours(
    model_dir: Path, source: tuple[str, str], tool: str
) -> None:
    assert template(model_dir, calls(*source)) == Parsers(tool, None)
    arguments = command(CPU, model_dir, VllmOptions(), 1)
    assert value(arguments, "--tool-call-parser") == tool
    plugins = "--tool-parser-plugin" in arguments
    assert plugins == tool.startswith("bridle_")
    if plugins:
        assert Path(value(arguments, "--tool-parser-plugin")).is_file()


def test_coheres_parsers_are_refused_without_their_package(model_dir: Path) -> None:
    assert template(model_dir, calls("<|START_ACTION|>")).tool == "cohere_command3"
    with pytest.raises(VllmError, match="/venv/bin/python -m pip install cohere-melody"):
        command(CPU, model_dir, VllmOptions(), 1)
    arguments = command(dataclasses.replace(CPU, melody=True), model_dir, VllmOptions(), 1)
    assert value(arguments, "--tool-call-parser") == "cohere_command3"
    assert "--tool-call-parser" not in command(CPU, model_dir, VllmOptions(tool_parser=None), 1)


def test_parsers_may_be_named_or_left_out(model_dir: Path) -> None:
    template(model_dir, CHATML_TOOLS_TEMPLATE)
    options = VllmOptions(tool_parser="mistral", reasoning_parser=None)
    arguments = command(CPU, model_dir, options, 1)
    assert value(arguments, "--tool-call-parser") == "mistral"
    assert "--reasoning-parser" not in arguments


def test_a_parser_of_vllms_that_would_not_start_without_a_token_is_not_chosen(
    model_dir: Path,
) -> None:
    source = calls('{"name": "', '", "parameters": ')
    assert template(model_dir, source) == Parsers("bridle_llama_json", None)
    backend = BackendTokenizer.from_file(str(model_dir / "tokenizer.json"))
    backend.add_special_tokens(["<|python_tag|>"])
    backend.save(str(model_dir / "tokenizer.json"))
    assert template(model_dir, source) == Parsers("llama3_json", None)


def test_the_tool_parser_follows_the_template_for_tools(model_dir: Path) -> None:
    (model_dir / "additional_chat_templates").mkdir()
    told = model_dir / "additional_chat_templates" / "tool_use.jinja"
    told.write_text("{{ tools }} <tool_call>")
    assert template(model_dir, "{{ messages }}") == Parsers("hermes", None)


def test_a_model_without_a_template_gets_no_parsers(model_dir: Path) -> None:
    assert choose_parsers(model_dir) == Parsers(None, None)
    assert "--tool-call-parser" not in command(CPU, model_dir, VllmOptions(), 1)


def test_on_cpu_prompts_are_computed_whole_in_float32(model_dir: Path) -> None:
    arguments = command(CPU, model_dir, VllmOptions(), 8001)
    assert value(arguments, "--dtype") == "float32"
    assert "--no-enable-chunked-prefill" in arguments
    assert value(arguments, "--max-num-batched-tokens") == "4096"
    assert value(arguments, "--port") == "8001"
    shorter = command(CPU, model_dir, VllmOptions(max_model_len=512), 1)
    assert value(shorter, "--max-model-len") == "512"
    assert value(shorter, "--max-num-batched-tokens") == "2048"


def test_on_gpu_the_checkpoints_type_and_chunked_prompts_stay(model_dir: Path) -> None:
    arguments = command(GPU, model_dir, VllmOptions(), 1)
    assert value(arguments, "--dtype") == "auto"
    assert not {"--no-enable-chunked-prefill", "--enforce-eager", "--block-size"} & {*arguments}


def test_what_the_contract_rests_on_is_always_said(model_dir: Path) -> None:
    for installation in (CPU, GPU):
        arguments = command(installation, model_dir, VllmOptions(), 1)
        assert value(arguments, "--generation-config") == "vllm"
        assert value(arguments, "--logprobs-mode") == "processed_logprobs"
        assert value(arguments, "--worker-cls") == "bridle_worker.BridleWorker"
        config = json.loads(value(arguments, "--weight-transfer-config"))
        assert config == {"backend": "bridle"}
        assert value(arguments, "--host") == "127.0.0.1"
        assert "--enable-prefix-caching" in arguments


def test_further_arguments_come_last(model_dir: Path) -> None:
    arguments = command(CPU, model_dir, VllmOptions(extra=("--dtype", "bfloat16")), 1)
    assert arguments[-2:] == ["--dtype", "bfloat16"]


@pytest.mark.parametrize("extra", [("--worker-cls", "theirs.Worker"), ("--worker-cls=theirs.W",)])
def test_another_worker_is_not_told_of_transfers_that_it_does_not_know(
    model_dir: Path, extra: tuple[str, ...]
) -> None:
    arguments = command(CPU, model_dir, VllmOptions(extra=extra), 1)
    assert not {"--weight-transfer-config", "bridle_worker.BridleWorker"} & {*arguments}


def test_our_own_reasoning_parser_is_a_plugin_and_formats_hold_from_the_first_token(
    model_dir: Path,
) -> None:
    template(model_dir, CHATML_TOOLS_TEMPLATE)
    arguments = command(CPU, model_dir, VllmOptions(max_model_len=64), 1)
    assert value(arguments, "--reasoning-parser") == "bridle_thinking"
    assert Path(value(arguments, "--reasoning-parser-plugin")).is_file()
    assert json.loads(value(arguments, "--structured-outputs-config"))["enable_in_reasoning"]


def test_adapters_are_off_unless_a_rank_is_given(model_dir: Path, tmp_path: Path) -> None:
    plain, adapted = VllmOptions(), VllmOptions(lora_rank=16)
    assert "--enable-lora" not in command(CPU, model_dir, plain, 1)
    assert value(command(CPU, model_dir, adapted, 1), "--max-lora-rank") == "16"
    between = command(CPU, model_dir, VllmOptions(lora_rank=20), 1)
    assert value(between, "--max-lora-rank") == "32", "vLLM has not every rank"
    switch = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    assert switch not in environment(CPU, plain, tmp_path, {})
    assert environment(CPU, adapted, tmp_path, {})[switch] == "1"


def test_vllm_sees_nothing_of_ours_but_its_own_folder(tmp_path: Path) -> None:
    variables = environment(CPU, VllmOptions(), tmp_path, {"PYTHONPATH": "/ours", "HOME": "/h"})
    assert Path(variables["PYTHONPATH"]).name == "inside"
    assert variables["HOME"] == "/h"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"


def test_with_a_key_every_route_asks_for_it_and_any_address_will_do(
    model_dir: Path, tmp_path: Path
) -> None:
    open_to_all = VllmOptions(host="0.0.0.0")  # noqa: S104 - what is tested
    with pytest.raises(VllmError, match="VLLM_API_KEY"):
        command(GPU, model_dir, open_to_all, 1)
    guarded = command(GPU, model_dir, open_to_all, 1, guarded=True)
    assert value(guarded, "--middleware") == "bridle_guard.RequireKey"
    assert "bridle_guard.RequireKey" not in command(GPU, model_dir, VllmOptions(), 1)
    given = environment(GPU, open_to_all, tmp_path, {"VLLM_API_KEY": "sesame"}, "/a/file")
    assert given["BRIDLE_GUARD_KEY_FILE"] == "/a/file"
    assert "sesame" not in given.values()


def test_replies_are_decoded_after_the_end_of_a_prompt_where_that_is_the_same(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priming = "bridle_decoding.PrimeWithTail"
    assert value(command(GPU, model_dir, VllmOptions(), 1), "--middleware") == priming
    assert priming not in command(GPU, model_dir, VllmOptions(prime_with_tail=False), 1)
    monkeypatch.setattr("bridle.engine.vllm.flags.decodes_alike", lambda _: False)
    assert priming not in command(GPU, model_dir, VllmOptions(), 1)


def test_attention_heads_without_a_kernel_are_refused_on_cpu_before_the_start(
    model_dir: Path,
) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(VllmError, match="heads of size 16"):
        command(CPU, model_dir, VllmOptions(), 1)
    assert command(GPU, model_dir, VllmOptions(), 1)


def test_a_model_that_does_not_say_its_context_needs_one_said_on_cpu(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("{}")
    with pytest.raises(VllmError, match="give --max-model-len"):
        command(CPU, model_dir, VllmOptions(), 1)
    assert command(CPU, model_dir, VllmOptions(max_model_len=64), 1)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.32.0", (0, 32, 0)), ("0.33.0rc1+cpu", (0, 33, 0)), ("0.32.1.dev4", (0, 32, 1)), ("x", ())],
)
def test_versions_compare_by_their_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert version_tuple(version) == numbers
