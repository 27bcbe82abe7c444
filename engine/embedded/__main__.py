"""``python -m bridle.engine.embedded --model DIR``: the embedded engine as a process of its own."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import threading

from bridle.engine.embedded.backend import EmbeddedSettings
from bridle.engine.embedded.engine import EmbeddedEngine
from bridle.engine.embedded.scheduler import SchedulerLimits

API_KEY_VARIABLE = "BRIDLE_ENGINE_API_KEY"


def main() -> None:
    arguments = _parser().parse_args()
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    if api_key is None and not _is_loopback(arguments.host):
        raise SystemExit(
            f"{arguments.host} is not a loopback address: set {API_KEY_VARIABLE} to the key that "
            "clients must send."
        )
    settings = EmbeddedSettings(
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_model_len=arguments.max_model_len,
        limits=SchedulerLimits(
            max_running=arguments.max_running,
            step_tokens=arguments.step_tokens,
            kv_bytes=int(arguments.kv_cache_gib * (1 << 30)),
        ),
    )
    engine = EmbeddedEngine(
        arguments.model,
        served_model_name=arguments.served_model_name,
        settings=settings,
        parse_thinking=arguments.parse_thinking,
        api_key=api_key,
        host=arguments.host,
        port=arguments.port,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with engine:
        print(engine.base_url, flush=True)
        stop.wait()


def _parser() -> argparse.ArgumentParser:
    limits = SchedulerLimits()
    parser = argparse.ArgumentParser(prog="python -m bridle.engine.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the model and its tokenizer")
    parser.add_argument("--served-model-name", help="default: the directory's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and prints it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-running", type=int, default=limits.max_running)
    parser.add_argument("--step-tokens", type=int, default=limits.step_tokens)
    parser.add_argument("--kv-cache-gib", type=float, default=limits.kv_bytes / (1 << 30))
    parser.add_argument(
        "--parse-thinking", action="store_true", help="split <think>…</think> into `reasoning`"
    )
    return parser


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
