"""``bridle engine``: serve a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bridle.cli.commands import engine_vllm
from bridle.cli.options import HostOption, JsonOption, PortOption, model_path, tokenizer_path
from bridle.cli.serving import announce, listening_on, stop_signals, wait_for
from bridle.cli.settings import settable
from bridle.cli.terminal import fail
from bridle.extras import needs_extra
from bridle.keys import API_KEY_VARIABLE
from bridle.run.environment import data_home, key_in
from bridle.run.settings import parse_overrides, settings_from

LimitsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A bound: max_running (sequences decoded at a time), step_tokens (tokens computed in "
        "a step) or kv_bytes (memory of keys and values). Repeatable.",
    ),
]
app = typer.Typer(help="Serve a policy.", no_args_is_help=True)


@app.callback()
def engine() -> None:
    """Serve a policy."""


app.command()(engine_vllm.vllm)


@app.command()
@settable("bridle.engine.embedded.scheduler:SchedulerLimits")
def embedded(
    model: Annotated[
        Path, typer.Option(parser=model_path, metavar="MODEL", help="Directory or Hub name.")
    ],
    served_model_name: Annotated[str | None, typer.Option(help="Default: directory name.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    device: Annotated[str, typer.Option(help="PyTorch's name of a device: cpu, cuda.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of the weights.")
    ] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="PyTorch's threads.")] = 1,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and reply. Default: the model's own.")
    ] = None,
    parse_thinking: Annotated[
        bool, typer.Option("--parse-thinking", help="Return <think>…</think> as the reasoning.")
    ] = False,
    assignments: LimitsOption = None,
    json: JsonOption = False,
) -> None:
    """Serve a Transformers model from a directory."""
    with needs_extra("train", "the embedded engine needs torch"):
        from bridle.engine.embedded import EmbeddedEngine, EmbeddedSettings
        from bridle.engine.embedded.scheduler import SchedulerLimits
    from bridle.proxy.settings import is_loopback

    api_key = key_in(API_KEY_VARIABLE)
    if api_key is None and not is_loopback(host):
        fail(f"{host} is reachable by others: set {API_KEY_VARIABLE} to the key they must send")
    settings = EmbeddedSettings(
        device=device,
        dtype=dtype,
        threads=threads,
        max_model_len=max_model_len,
        limits=settings_from(SchedulerLimits, overrides=parse_overrides(assignments or ())),
    )
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
    stop = stop_signals()
    with serving:
        announce(serving.base_url, json, f"Engine serving {model} on {serving.base_url}")
        wait_for(stop)


@app.command()
def scripted(
    script: Annotated[
        str | None,
        typer.Option(
            help="FILE.py:FUNCTION that replies to a ScriptedRequest (bridle.engine.scripted). "
            "Default: calls the first tool that is offered, then answers with its result."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=tokenizer_path,
            metavar="MODEL",
            help="Whose tokenizer replies are written in. Default: a small one.",
        ),
    ] = None,
    served_model_name: Annotated[str, typer.Option(help="The model's name.")] = "scripted",
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    json: JsonOption = False,
) -> None:
    """Serve replies of a Python function, without a model and without torch: for a first look."""
    from bridle.engine.scripted import ScriptedEngine
    from bridle.engine.stand_in import stand_in
    from bridle.proxy.settings import is_loopback
    from bridle.user_code import load_object

    if not is_loopback(host):
        fail(f"the scripted engine asks for no key and serves this machine only, not {host}", 2)
    reply = stand_in if script is None else load_object(script)
    directory = model or _small_tokenizer(data_home() / "scripted")
    with listening_on(host, port):
        serving = ScriptedEngine(
            directory,
            reply,
            served_model_name=served_model_name,
            max_model_len=1 << 20,
            host=host,
            port=port,
        )
    stop = stop_signals()
    with serving:
        announce(serving.base_url, json, f"Scripted engine on {serving.base_url}")
        wait_for(stop)


def _small_tokenizer(directory: Path) -> Path:
    """Return the directory of a tokenizer of English text with a chat template for tools.

    It is made at the first use.
    """
    if not (directory / "tokenizer_config.json").is_file():
        import pydoc_data.topics

        from bridle.recipes.models.tiny_tokenizer import train_tokenizer

        train_tokenizer(directory, list(pydoc_data.topics.topics.values()), vocab_size=4096)
    return directory
