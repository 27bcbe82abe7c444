"""Genuine tokenizers and chat templates as model directories, from the package registries.

A directory holds ``tokenizer.json``, ``tokenizer_config.json`` (with the template) and a
``config.json`` with the family's ``model_type``, by which an engine chooses its parsers. It holds
no weights. If no registry has a family's own tokenizer, its genuine template is paired with the
nearest genuine tokenizer, to which the family's special tokens are added; the entry records that.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from bridle.bench.family_tokenizers import tokenizer_directory
from bridle.recipes.models.packages import Package, cache_directory, fetch

_TRL: Final = Package(
    "pypi",
    "trl",
    "1.16.0",
    "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
)
_LLAMA_CPP: Final = Package(
    "pypi-source",
    "llama-cpp-python",
    "0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
)
CallIds = Literal["openai", "nine", "counted"]
"""The form of tool-call ids: ``chatcmpl-tool-…``, nine characters (Mistral), or
``functions.NAME:INDEX`` (Kimi)."""


@dataclass(frozen=True, slots=True)
class Family:
    """One genuine template and the tokenizer that it is paired with."""

    template: str
    """The source of the template: ``trl/NAME``, ``llama.cpp/NAME``, or ``own`` for the one that
    comes with the tokenizer."""
    tokenizer: str
    model_type: str
    """The family's ``model_type`` in ``config.json``."""
    eos: tuple[str, ...]
    """The tokens that end a reply; the first is the tokenizer's ``eos_token``."""
    bos: str | None = None
    """The template's ``bos_token``, if it writes one."""
    added: tuple[str, ...] = ()
    """Special tokens of the family, besides the delimiters that appear in its template."""
    stand_in: bool = False
    """True if the tokenizer is the nearest genuine one instead of the family's own."""
    call_end: str | None = None
    """The token that ends a reply with tool calls, if it differs from the first of ``eos``."""
    text_end: str | None = None
    """The token that ends a reply without tool calls, if it differs from the first of ``eos``."""
    earlier_end: str | None = None
    """The token that the template writes after earlier replies, if the policy samples another
    one."""
    call_ids: CallIds = "openai"
    """The form of the tool-call ids that the engine makes for the family."""
    renumbered: bool = False
    """True if the copy of the template numbers the calls anew, which is undone here.

    Such a copy changes a list, which the sandbox of Transformers and vLLM refuses.
    """
    token_suffix: str | None = None
    """The ``token_suffix`` in the tokenizer's configuration, which vLLM's parsers need."""


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM = (*_THINK, *_CALL, *_ARGUMENTS, "[gMASK]", "<sop>", "<|endoftext|>", "<|observation|>")
_LLAMA_BOS, _DEEPSEEK_BOS = "<|begin_of_text|>", "<｜begin▁of▁sentence｜>"
_PYTHON: Final = ("<|python_tag|>",)
"""The name of the token in the family's own tokenizer. The packaged tokenizer keeps it as a
reserved token."""
_LLAMA_EOS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_DEEPSEEK_EOS = ("<｜end▁of▁sentence｜>",)
_DEEPSEEK_TASKS = tuple(
    f"<｜{name}｜>"
    for name in ("latest_reminder", "action", "authority", "domain", "query", "read_url", "title")
)
_QWEN_EOS = ("<|im_end|>", "<|endoftext|>")
_GEMMA4 = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|think|>")
_GEMMA4_CALL = ("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
_GEMMA4_MEDIA = ("<|image>", "<|image|>", "<image|>")
_HUNYUAN_SUFFIX = ":opensource"
_HUNYUAN_TURNS = tuple(
    f"<｜{name}{_HUNYUAN_SUFFIX}｜>"
    for name in ("hy_User", "hy_Assistant", "hy_begin_of_sentence", "reasoning_mode")
)
_HUNYUAN_SHOWN = tuple(
    token.replace(">", f"{_HUNYUAN_SUFFIX}>")
    for token in (
        *(*_THINK, *_CALL, *_ARGUMENTS, "<tool_sep>", "<tool_calls>", "</tool_calls>"),
        *("<tool_responses>", "</tool_responses>"),
    )
)
"""The template composes these tokens and those of the turns from parts."""

_qwen = partial(Family, tokenizer="qwen3", model_type="qwen3", eos=_QWEN_EOS)
_llama = partial(Family, tokenizer="llama3_1", model_type="llama", eos=_LLAMA_EOS, bos=_LLAMA_BOS)
_deepseek = partial(
    Family,
    tokenizer="deepseek_v3",
    model_type="deepseek_v3",
    eos=_DEEPSEEK_EOS,
    bos=_DEEPSEEK_BOS,
)
_gemma = partial(Family, tokenizer="gemma3", eos=("<end_of_turn>", "<eos>"), bos="<bos>")
_mistral = partial(
    Family, tokenizer="tekken", model_type="mistral", eos=("</s>",), bos="<s>", call_ids="nine"
)
_borrowed = partial(Family, eos=("<|im_end|>",), stand_in=True)
_glm = partial(
    _borrowed,
    tokenizer="qwen3",
    eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
    added=_GLM,
    text_end="<|user|>",
    call_end="<|observation|>",
)
_lfm = partial(
    _borrowed,
    tokenizer="llama3_1",
    model_type="lfm2",
    bos="<|startoftext|>",
    added=("<|tool_call_start|>", "<|tool_call_end|>"),
)
_granite = partial(_borrowed, tokenizer="gptoss", eos=("<|end_of_text|>",))
_kimi = partial(
    _borrowed,
    tokenizer="gptoss",
    model_type="kimi_k2",
    eos=("<|im_end|>", "[EOS]"),
    bos="[BOS]",
    call_ids="counted",
    renumbered=True,
)
_nemotron3 = partial(
    _borrowed, tokenizer="tekken", model_type="nemotron_h", bos="<s>", added=(*_THINK, *_CALL)
)
_laguna = partial(
    _borrowed,
    tokenizer="llama3_1",
    model_type="laguna",
    eos=("</assistant>", "〈|EOS|〉"),
    added=(*_THINK, *_CALL, *_ARGUMENTS, "<assistant>", "<user>", "</user>"),
)

FAMILIES: Final[dict[str, Family]] = {
    "qwen2.5": _qwen("llama.cpp/Qwen-Qwen2.5-7B-Instruct", model_type="qwen2"),
    "qwen3": _qwen("own"),
    "qwen3-2507": _qwen("trl/qwen3_instruct_2507"),
    "qwen3-coder": _qwen("llama.cpp/Qwen3-Coder", model_type="qwen3_moe"),
    "qwen3.5": _qwen("trl/qwen3_5_think", model_type="qwen3_5", stand_in=True),
    "qwen3-vl": _qwen("trl/qwen3_vl", model_type="qwen3_vl"),
    "qwen3.6": _qwen("trl/qwen3_6", model_type="qwen3_5_moe", stand_in=True),
    "qwen3.8": _qwen("trl/qwen3_8", model_type="qwen3_5", stand_in=True),
    "qwq": _qwen("llama.cpp/Qwen-QwQ-32B", model_type="qwen2"),
    "llama3.1": _llama("llama.cpp/meta-llama-Llama-3.1-8B-Instruct"),
    "llama3.2": _llama("llama.cpp/meta-llama-Llama-3.2-3B-Instruct", added=_PYTHON),
    "llama3.3": _llama("llama.cpp/meta-llama-Llama-3.3-70B-Instruct", added=_PYTHON),
    "deepseek-v3": _deepseek("trl/deepseekv3"),
    "deepseek-v3.1": _deepseek("llama.cpp/deepseek-ai-DeepSeek-V3.1", added=_THINK),
    "deepseek-v3.2": _deepseek(
        "llama.cpp/deepseek-ai-DeepSeek-V3.2",
        model_type="deepseek_v32",
        added=(*_THINK, "｜DSML｜"),
    ),
    "deepseek-v4": _deepseek(
        "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731",
        model_type="deepseek_v4",
        added=(*_THINK, "｜DSML｜", *_DEEPSEEK_TASKS),
        stand_in=True,
    ),
    "deepseek-r1": _deepseek("llama.cpp/llama-cpp-deepseek-r1", added=_THINK),
    "deepseek-r1-distill": _deepseek(
        "trl/deepseek_r1_distill", model_type="llama", added=_THINK, stand_in=True
    ),
    "gemma2": _gemma("trl/gemma", model_type="gemma2"),
    "gemma3": _gemma("trl/gemma3", model_type="gemma3"),
    "gemma4": _gemma(
        "trl/gemma4_v5",
        model_type="gemma4",
        eos=("<turn|>", "<eos>", "<|tool_response>"),
        added=(*_GEMMA4, *_GEMMA4_CALL, *_GEMMA4_MEDIA),
        stand_in=True,
        call_end="<|tool_response>",
    ),
    "gpt-oss": Family(
        "trl/gptoss",
        "gptoss",
        "gpt_oss",
        ("<|return|>", "<|call|>"),
        "<|startoftext|>",
        call_end="<|call|>",
        earlier_end="<|end|>",
    ),
    "smollm2": Family("own", "smollm2", "llama", ("<|im_end|>",), "<|im_start|>"),
    "smollm3": _borrowed(
        "llama.cpp/HuggingFaceTB-SmolLM3-3B",
        "llama3_1",
        "smollm3",
        bos=_LLAMA_BOS,
        added=(*_THINK, *_CALL),
    ),
    "glm4.5": _glm("trl/glm4moe", model_type="glm4_moe"),
    "glm4.7": _glm("llama.cpp/GLM-4.7-Flash", model_type="glm4_moe_lite"),
    "lfm2": _lfm("trl/lfm2_v2"),
    "lfm2.5": _lfm("trl/lfm2_2_5_v2"),
    "granite3.3": _granite("llama.cpp/ibm-granite-granite-3.3-2B-Instruct", model_type="granite"),
    "granite4": _granite(
        "llama.cpp/ibm-granite-granite-4.0", model_type="granitemoehybrid", added=_CALL
    ),
    "phi3.5": Family(
        "llama.cpp/microsoft-Phi-3.5-mini-instruct",
        "llama2",
        "phi3",
        ("<|endoftext|>", "<|end|>"),
        "<s>",
        text_end="<|end|>",
        call_end="<|end|>",
    ),
    "nemotron-nano-v2": _borrowed(
        "llama.cpp/NVIDIA-Nemotron-Nano-v2",
        "tekken",
        "nemotron_h",
        eos=("<SPECIAL_12>",),
        bos="<s>",
        added=("<SPECIAL_10>", "<SPECIAL_11>", *_THINK, "<TOOLCALL>", "</TOOLCALL>"),
    ),
    "nemotron3": _nemotron3("trl/nemotron_3_nano"),
    "nemotron3-super": _nemotron3("trl/nemotron_3_super"),
    "nemotron3-ultra": _nemotron3("trl/nemotron_3_ultra"),
    "nemotron3.5": _nemotron3("trl/nemotron_3_5_lightning"),
    "mistral-nemo": _mistral("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407"),
    "mistral-small-3.2": _mistral(
        "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506", model_type="mistral3"
    ),
    "ministral3": _mistral(
        "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512", model_type="mistral3"
    ),
    "devstral": _mistral("llama.cpp/unsloth-mistral-Devstral-Small-2507"),
    "kimi-k2": _kimi("llama.cpp/Kimi-K2-Instruct"),
    "kimi-k2-thinking": _kimi("llama.cpp/Kimi-K2-Thinking", added=_THINK),
    "minimax-m2": _borrowed(
        "llama.cpp/MiniMax-M2",
        "gptoss",
        "minimax_m2",
        eos=("[e~[",),
        bos="]~!b[",
        added=(*_THINK, "]~b]", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "seed-oss": _borrowed(
        "llama.cpp/ByteDance-Seed-OSS",
        "qwen3",
        "seed_oss",
        eos=("<seed:eos>",),
        bos="<seed:bos>",
        added=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    "apertus": _borrowed(
        "llama.cpp/Apertus-8B-Instruct",
        "tekken",
        "apertus",
        eos=("<|assistant_end|>", "</s>", "<|tools_suffix|>"),
        bos="<s>",
        call_end="<|tools_suffix|>",
    ),
    "cohere-command-r7b": _borrowed(
        "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "llama3_1",
        "cohere2",
        eos=("<|END_OF_TURN_TOKEN|>",),
        bos="<BOS_TOKEN>",
        added=("<EOS_TOKEN>",),
    ),
    "gigachat3": _borrowed(
        "llama.cpp/GigaChat3-10B-A1.8B",
        "deepseek_v3",
        "deepseek_v3",
        eos=("<|message_sep|>", "</s>"),
        bos="<s>",
        added=("<|role_sep|>",),
    ),
    "minicpm5": _borrowed(
        "llama.cpp/openbmb-MiniCPM5-1B",
        "llama3_1",
        "llama",
        bos="<s>",
        added=(*_THINK, "<function", "</function>", "<param", "</param>"),
    ),
    "step3.5": _borrowed(
        "llama.cpp/StepFun3.5-Flash",
        "deepseek_v3",
        "step3p5",
        bos=_DEEPSEEK_BOS,
        added=(*_THINK, *_CALL),
    ),
    "hunyuan3": _borrowed(
        "llama.cpp/tencent-Hy3",
        "deepseek_v3",
        "hy_v3",
        eos=("<｜hy_eos:opensource｜>",),
        added=(*_HUNYUAN_TURNS, *_HUNYUAN_SHOWN),
        token_suffix=_HUNYUAN_SUFFIX,
    ),
    "laguna": _laguna("llama.cpp/poolside-Laguna-XS.2"),
    "laguna-s-2.1": _laguna("llama.cpp/poolside-Laguna-S-2.1"),
    "functionary3.1": _llama("llama.cpp/meetkai-functionary-medium-v3.1"),
}
"""The families by the name that benchmarks and tests use."""

_DELIMITER: Final = re.compile(r"<\|[\w.:/-]+\|>|<｜[^｜\s{}]+｜>")


def model_directory(name: str, root: Path | None = None) -> Path:
    """Return the model directory of ``FAMILIES[name]`` in the cache, made first if missing.

    Raise :class:`bridle.recipes.models.packages.PackageNotFetched`.
    """
    root = root or cache_directory()
    family = FAMILIES[name]
    directory = root / "families" / name
    stamp = directory / "family.txt"
    if stamp.exists() and stamp.read_text() == repr(family):
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        _write(family, tokenizer_directory(family.tokenizer, root), made, root)
        (made / stamp.name).write_text(repr(family))
        made.replace(directory)
    return directory


def _write(family: Family, source: Path, made: Path, root: Path) -> None:
    own = json.loads((source / "tokenizer_config.json").read_text())
    template = own.get("chat_template")
    if template is None and (source / "chat_template.jinja").exists():
        template = (source / "chat_template.jinja").read_text()
    if family.template != "own":
        template = _template(family.template, root)
    if family.renumbered:
        template = _with_own_call_ids(template)
    backend = BackendTokenizer.from_file(str(source / "tokenizer.json"))
    wanted = [*family.eos, *([family.bos] if family.bos else []), *family.added]
    wanted += sorted(set(_DELIMITER.findall(template)))
    missing = [token for token in dict.fromkeys(wanted) if backend.token_to_id(token) is None]
    # As in the families' own files: markup of the conversation is special, markup that replies
    # are parsed by is not, so that decoding shows it.
    shown = {*_THINK, *_CALL, *_ARGUMENTS, *_HUNYUAN_SHOWN}
    backend.add_special_tokens([AddedToken(t, special=True) for t in missing if t not in shown])
    backend.add_tokens([AddedToken(t, special=False) for t in missing if t in shown])
    backend.save(str(made / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "bos_token": family.bos,
        "eos_token": family.eos[0],
    }
    if family.token_suffix is not None:
        config["token_suffix"] = family.token_suffix
    (made / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    ids = [backend.token_to_id(token) for token in family.eos]
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (made / "config.json").write_text(json.dumps({"model_type": family.model_type}))


def _template(name: str, root: Path) -> str:
    source, _, template = name.partition("/")
    if source == "trl":
        with zipfile.ZipFile(fetch(_TRL, root)) as archive:
            return archive.read(f"trl/chat_templates/{template}.jinja").decode()
    return _llama_cpp_templates(root)[template]


_RENUMBERED: Final = {
    re.compile(pattern, re.DOTALL): own
    for pattern, own in (
        (r"'functions\.' \+ tool_call\['function'\]\['name'\][^%]*", "tool_call['id'] -"),
        (r"\{%- set (tool_call_counter\.value|_ = tool_response_queue)[^%]*%\}\s*", ""),
        (
            r"\{%- if tool_response_queue\.ids -%\}.*?\{%- endif -%\}",
            "{%- set tool_call_id = message.tool_call_id -%}",
        ),
    )
}
"""The code by which llama.cpp's copies number the calls anew, and the code that it replaces."""


def _with_own_call_ids(template: str) -> str:
    for pattern, own in _RENUMBERED.items():
        template = pattern.sub(own, template)
    return template


@cache
def _llama_cpp_templates(root: Path) -> dict[str, str]:
    """Return the templates in llama.cpp's source by name.

    They are read in one pass of the archive.
    """
    found = {}
    with tarfile.open(fetch(_LLAMA_CPP, root)) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parent.name == "templates":
                file = archive.extractfile(member)
                assert file is not None
                found[path.stem] = file.read().decode()
    return found
