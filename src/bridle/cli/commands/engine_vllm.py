"""``bridle engine vllm``: start vLLM, check it and keep it running, or check a running one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridle.cli.options import JsonOption, PortOption, base_urls, model_path
from bridle.cli.serving import announce, leave_on_sigterm, stop_signals, wait_for
from bridle.cli.settings import configured
from bridle.cli.terminal import err, fail, out, print_json
from bridle.engine.vllm.flags import VllmOptions
from bridle.keys import UPSTREAM_KEY_VARIABLE, VLLM_KEY_VARIABLE
from bridle.run.environment import key_in

if TYPE_CHECKING:
    from bridle.engine.vllm import Check, Expectation, VllmServer

NOT_SERVING = 1
CHECK_FAILED = 3
INTERRUPTED = 130


@configured(
    VllmOptions,
    {
        "--served-model-name": "served_name",
        "--host": "host",
        "--max-model-len": "max_model_len",
    },
)
def vllm(
    config: VllmOptions,
    model: Annotated[
        Path | None,
        typer.Option(parser=model_path, metavar="MODEL", help="Directory or Hub name."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            callback=base_urls, help="Check the vLLM at this URL instead of starting one."
        ),
    ] = None,
    port: PortOption = 8000,
    run_dir: Annotated[
        Path, typer.Option(help="vLLM's log, and a note of the weights it served last.")
    ] = Path("runs/vllm"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Start with the weights that --run-dir notes as served last."
        ),
    ] = False,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Python interpreter with vLLM. Default: $BRIDLE_VLLM_PYTHON, .venv-vllm."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve a policy with vLLM, or check a vLLM that runs already.

    Exit status: 1 when vLLM does not start or stays down, 3 when a check fails.
    """
    from bridle.engine.vllm import Expectation, VllmServer

    config = replace(
        config,
        port=port,
        version=config.version or 0,
        tool_parser=_named(config.tool_parser),
        reasoning_parser=_named(config.reasoning_parser),
    )
    expect = Expectation(
        context=config.max_model_len,
        private_network=config.private_network,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )
    if (model is None) == (url is None):
        fail("give --model DIR to start vLLM, or --url URL to check one that runs", 2)
    if url is not None:
        checks = _examined(url, expect, json, key_in(UPSTREAM_KEY_VARIABLE))
        if json:
            print_json({"url": url, "checks": _as_data(checks)})
        return
    assert model is not None  # noqa: S101 - one of the two was given
    key = key_in(UPSTREAM_KEY_VARIABLE) or key_in(VLLM_KEY_VARIABLE)
    leave_on_sigterm()
    try:
        server = VllmServer(
            model,
            run_dir,
            options=config,
            python=python,
            resume=resume,
            on_event=err.print,
            api_key=key,
        )
        with err.status("vLLM starts."):
            server.start()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    try:
        checks = _examined(server.base_url, expect, json, key)
        _serve(server, checks, json, f"vLLM serving {model} on {server.base_url}")
    finally:
        server.stop()


def _serve(server: VllmServer, checks: list[Check], json: bool, line: str) -> None:
    """Announce the server, and wait until a signal.

    End the command if vLLM is not started again.
    """
    stop = stop_signals()
    announce(server.base_url, json, f"{line}, log in {server.log}", checks=_as_data(checks))
    wait_for(stop, lambda: server.refusal is not None)
    if server.refusal is not None:
        raise typer.Exit(NOT_SERVING)


def _examined(url: str, expect: Expectation, json: bool, key: str | None) -> list[Check]:
    """Print the engine's checks, one line each, and return all of them.

    With ``json``, only the failed ones are printed, to standard error. End the command if one
    failed.
    """
    from bridle.engine.vllm import check_engine, failures

    checks = check_engine(url, expect=expect, api_key=key)
    failed = failures(checks)
    for check in failed if json else checks:
        (err if json else out).print(check.line)
    if failed:
        raise typer.Exit(CHECK_FAILED)
    return checks


def _as_data(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(check) for check in checks]


def _named(parser: str | None) -> str | None:
    return None if parser == "none" else parser
