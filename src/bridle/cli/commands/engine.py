"""``bridle engine``: serve a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.commands import engine_vllm
from bridle.cli.extras import needs_extra
from bridle.cli.options import JsonOption
from bridle.cli.serving import announce, listening_on, wait_for_signal
from bridle.cli.terminal import fail
from bridle.run.environment import API_KEY_VARIABLE, key_in

app = typer.Typer(help="Serve a policy.", no_args_is_help=True)


@app.callback()
def engine() -> None:
    """Serve a policy."""


app.command()(engine_vllm.vllm)


@app.command()
def embedded(
    model: Annotated[Path, typer.Option(help="Directory of the model and its tokenizer.")],
    served_model_name: Annotated[str | None, typer.Option(help="Default: directory name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    threads: Annotated[int, typer.Option(help="Threads of the model's arithmetic.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Default: the model's own.")] = None,
    parse_thinking: Annotated[
        bool, typer.Option("--parse-thinking", help="Give <think>…</think> as the reasoning.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Serve a local Transformers model on this machine's CPU."""
    with needs_extra("train", "the embedded engine needs torch"):
        from bridle.engine.embedded import EmbeddedEngine, EmbeddedSettings
    from bridle.proxy.settings import is_loopback

    api_key = key_in(API_KEY_VARIABLE)
    if api_key is None and not is_loopback(host):
        fail(f"{host} is reachable by others: set {API_KEY_VARIABLE} to the key they must send")
    settings = EmbeddedSettings(threads=threads, max_model_len=max_model_len)
    with listening_on(host, port):
        serving = EmbeddedEngine(
            model,
            served_model_name=served_model_name,
            settings=settings,
            parse_thinking=parse_thinking,
            api_key=api_key,
            host=host,
            port=port,
        )
    with serving:
        announce(serving.base_url, json, f"Engine serving {model} on {serving.base_url}")
        wait_for_signal()
