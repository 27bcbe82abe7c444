"""vLLM's command line and environment, from a few options. docs/vllm.md explains each flag."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from bridle.engine.contract.contract import PROCESSED_LOGPROBS
from bridle.engine.vllm.inside.bridle_decoding import decodes_alike
from bridle.engine.vllm.installation import COHERE_MELODY, Installation, VllmError
from bridle.engine.vllm.lora import served_rank
from bridle.engine.vllm.parsers import (
    AUTO,
    OWN_CALLS,
    OWN_OPEN_THINKING,
    OWN_THINKING,
    own_parser,
    parsers_for,
)
from bridle.keys import VLLM_KEY_VARIABLE, without_keys

INSIDE: Final = Path(__file__).parent / "inside"
"""The only folder of ours on vLLM's PYTHONPATH."""
WORKER: Final = "bridle_worker.BridleWorker"
TRANSFER_BACKEND: Final = "bridle"
"""The name under which ``WORKER`` registers its end of weight transfers."""
SERVED_FILE_VARIABLE: Final = "BRIDLE_SERVED_FILE"
LAUNCHER_VARIABLE: Final = "BRIDLE_LAUNCHER"
KEY_FILE_VARIABLE: Final = "BRIDLE_GUARD_KEY_FILE"
"""The variable that names the file from which ``GUARD`` reads the key."""
GUARD: Final = "bridle_guard.RequireKey"
"""The middleware by which vLLM's control routes require the key too
(``inside/bridle_guard.py``)."""
PRIMING: Final = "bridle_decoding.PrimeWithTail"
"""The middleware by which vLLM decodes replies without decoding their prompts first
(``inside/bridle_decoding.py``)."""
CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Options of a vLLM and of its supervision; everything else follows from the contract."""

    served_name: str = "policy"
    """The model name that requests use."""
    host: str = "127.0.0.1"
    """The address to listen on. Without a key, anything but loopback is refused unless
    ``private_network`` is set."""
    private_network: bool = False
    """True if the address is reachable by trusted machines only, as within a compose network."""
    port: int = 0
    """The port to listen on; 0 for a free one."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and reply together; ``None`` for the model's own limit."""
    dtype: str = AUTO
    """The type of the weights; ``auto`` means float32 on CPU, and the checkpoint's own on GPU."""
    tool_parser: str | None = AUTO
    """The tool parser: ``auto`` for the one that reads the markup of the model's template, ``None``
    for none."""
    reasoning_parser: str | None = AUTO
    """The reasoning parser: ``auto`` or ``None`` as for ``tool_parser``."""
    lora_rank: int | None = None
    """Largest rank of LoRA adapters; ``None`` for no adapters."""
    lora_adapters: int = 2
    """Maximum number of adapters in one batch: for each policy two, which meet in each publish."""
    cpu_kv_cache_gib: int = 4
    """Memory for keys and values on CPU, in GiB."""
    prime_with_tail: bool = True
    """True if replies are decoded after the last 64 tokens of their prompt instead of all.

    It takes effect if both ways give the same text with the model's tokenizer."""
    extra: tuple[str, ...] = ()
    """Further arguments, which are last on the command line, so that they take precedence."""
    version: int | None = None
    """The policy version of the weights in the model's directory."""
    restarts: int = 3
    """Number of restarts in a row after vLLM dies; an hour of service resets the count."""
    ready_timeout_s: float = 600.0
    """Seconds within which vLLM must serve after a start."""


def command(
    installation: Installation,
    model_dir: Path,
    options: VllmOptions,
    port: int,
    *,
    guarded: bool = False,
) -> list[str]:
    """Return the command that serves ``model_dir``.

    With ``guarded``, only clients with the key are served. Raise :class:`VllmError` for options
    that are not allowed.
    """
    if not (is_loopback(options.host) or options.private_network or guarded):
        raise VllmError(
            f"vLLM on {options.host} would let anyone there replace its weights: set "
            f"{VLLM_KEY_VARIABLE} to a key, listen on 127.0.0.1, or say that the network is private"
        )
    if installation.cpu:
        _require_kernels(model_dir)
    arguments = [
        *("--host", options.host, "--port", str(port)),
        *("--model", str(model_dir), "--served-model-name", options.served_name),
        *("--dtype", _dtype(installation, options)),
        *("--generation-config", "vllm"),
        *("--logprobs-mode", PROCESSED_LOGPROBS),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *_worker(options),
        *_context(installation, model_dir, options),
        *_parsing(installation, model_dir, options),
        *_lora(options),
        *(("--middleware", GUARD) if guarded else ()),
        *_priming(options, model_dir),
        *options.extra,
    ]
    return [str(installation.python), str(INSIDE / "bridle_start.py"), *arguments]


def environment(
    installation: Installation,
    options: VllmOptions,
    served_file: Path,
    base: Mapping[str, str],
    key_file: str | None = None,
) -> dict[str, str]:
    """Return ``base`` without keys, and with the variables that vLLM needs.

    They are for control routes, our worker, the file of its key, and no usage reports.
    """
    chosen = {
        "PYTHONPATH": str(INSIDE),
        LAUNCHER_VARIABLE: str(os.getpid()),
        SERVED_FILE_VARIABLE: str(served_file),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if installation.cpu:
        chosen["VLLM_CPU_KVCACHE_SPACE"] = str(options.cpu_kv_cache_gib)
        # The CPU build has its own thread binding; one thread here would be the limit of all.
        base = {name: value for name, value in base.items() if name != "OMP_NUM_THREADS"}
    if key_file is not None:
        chosen[KEY_FILE_VARIABLE] = key_file
    if options.lora_rank is not None:
        chosen["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return {**without_keys(base), **chosen}


def _priming(options: VllmOptions, model_dir: Path) -> list[str]:
    if not options.prime_with_tail:
        return []
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return ["--middleware", PRIMING] if decodes_alike(tokenizer) else []


def _worker(options: VllmOptions) -> list[str]:
    """Return the flags for our worker and its end of weight transfers.

    Another worker does not know that end, so there are none if ``extra`` chooses one.
    """
    if any(argument.partition("=")[0] == "--worker-cls" for argument in options.extra):
        return []
    transfers = json.dumps({"backend": TRANSFER_BACKEND})
    return ["--worker-cls", WORKER, "--weight-transfer-config", transfers]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _dtype(installation: Installation, options: VllmOptions) -> str:
    if options.dtype != AUTO:
        return options.dtype
    return "float32" if installation.cpu else "auto"


def _context(installation: Installation, model_dir: Path, options: VllmOptions) -> list[str]:
    length = options.max_model_len
    flags = [] if length is None else ["--max-model-len", str(length)]
    if installation.cpu:
        # A prompt computed in pieces rewinds a seeded sampler after each piece. CPU generators
        # cannot be rewound, and vLLM 0.32 dies of it: prompts are computed whole.
        batched = max(length or _model_context(model_dir), 2048)
        flags += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
        # Blocks are what the prefix cache reuses; 32 is the least that the fast kernels take.
        flags += ["--block-size", "32", "--enforce-eager"]
    return flags


def _model_context(model_dir: Path) -> int:
    length = _config(model_dir).get("max_position_embeddings")
    if not isinstance(length, int):
        raise VllmError(f"{model_dir} does not say how long a context may be: give --max-model-len")
    return length


def _require_kernels(model_dir: Path) -> None:
    """Raise :class:`VllmError` for attention head sizes that end vLLM at the first request."""
    config = _config(model_dir)
    size = config.get("head_dim")
    if size is None and config.get("hidden_size") and config.get("num_attention_heads"):
        size = config["hidden_size"] // config["num_attention_heads"]
    if size is not None and size not in CPU_HEAD_SIZES:
        raise VllmError(
            f"{model_dir} has attention heads of size {size}; vLLM on CPU has kernels for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def _config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return config


def _parsing(installation: Installation, model_dir: Path, options: VllmOptions) -> list[str]:
    chosen = parsers_for(model_dir, options.tool_parser, options.reasoning_parser)
    tool, reasoning = chosen.tool, chosen.reasoning
    of_cohere = [name for name in (tool, reasoning) if name and name.startswith("cohere_command")]
    if of_cohere and not installation.melody:
        raise VllmError(
            f"vLLM's parser {of_cohere[0]} needs a package that vLLM does not bring: run "
            f"`{installation.python} -m pip install {COHERE_MELODY}`, or choose other parsers with "
            "--set tool_parser=NAME and reasoning_parser=NAME, or none"
        )
    flags = []
    if tool is not None:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", tool]
        if tool.startswith(own_parser("")):
            flags += ["--tool-parser-plugin", str(INSIDE / f"{OWN_CALLS}.py")]
    if reasoning is not None:
        flags += ["--reasoning-parser", reasoning]
    if reasoning in (OWN_THINKING, OWN_OPEN_THINKING):
        flags += ["--reasoning-parser-plugin", str(INSIDE / f"{OWN_THINKING}.py")]
    if reasoning == OWN_THINKING:
        # A reply need not reason, so a requested format holds from its first token.
        flags += ["--structured-outputs-config", '{"enable_in_reasoning": true}']
    return flags


def _lora(options: VllmOptions) -> list[str]:
    if options.lora_rank is None:
        return []
    return [
        "--enable-lora",
        *("--max-lora-rank", str(served_rank(options.lora_rank))),
        *("--max-loras", str(options.lora_adapters)),
    ]
