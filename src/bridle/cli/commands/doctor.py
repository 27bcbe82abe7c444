"""``bridle doctor``: is everything in place for exact recording, and what does the model's chat
template do to a conversation?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bridle.cli.options import JsonOption, StoreOption, base_urls
from bridle.cli.terminal import out, print_json
from bridle.run.environment import UPSTREAM_KEY_VARIABLE, key_in


def doctor(
    store: StoreOption,
    model: Annotated[
        Path | None, typer.Option(help="The model's directory; its template is examined.")
    ] = None,
    upstream: Annotated[
        str | None, typer.Option(callback=base_urls, help="The engine's base URL.")
    ] = None,
    private_network: Annotated[
        bool,
        typer.Option(
            "--private-network", help="State that only trusted machines reach the engine."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Examine template, engine and store; exit with 1 when something is broken."""
    from bridle.run.diagnosis import (
        examine_engine,
        examine_store,
        examine_template,
        examine_tokenizer,
    )

    found: dict[str, Any] = {}
    if model is not None:
        found["template"] = examine_template(model)
    if upstream is not None:
        found["engine"] = examine_engine(
            upstream,
            api_key=key_in(UPSTREAM_KEY_VARIABLE),
            private_network=private_network,
        )
    sound = not any(verdict["broken"] for verdict in found.values())
    if model is not None and upstream is not None and sound:
        key = key_in(UPSTREAM_KEY_VARIABLE)
        found["tokenizer"] = examine_tokenizer(model, upstream, api_key=key)
    found["store"] = examine_store(store)
    found["broken"] = [part for part, verdict in found.items() if verdict["broken"]]
    if json:
        print_json(found)
    else:
        _print(found)
    if found["broken"]:
        raise typer.Exit(1)


def _print(found: dict[str, Any]) -> None:
    for part, lines in _PARTS:
        if part not in found:
            continue
        verdict = found[part]
        _say(f"{'BROKEN' if verdict['broken'] else 'ok':6}  {part}")
        for line in lines(verdict):
            _say(f"        {line}")


def _template(verdict: dict[str, Any]) -> list[str]:
    if verdict["broken"]:
        return [verdict["broken"]]
    return [
        verdict["model"],
        f"history is prefix-preserving: {_yes(verdict['prefix_preserving'])}",
        f"tails are local: {_yes(verdict['tails_local'])}",
        f"thinking: {verdict['thinking']}",
        f"tool-call arguments re-serialised: {_yes(verdict['arguments_reserialised'])}",
        f"tool calls: {_tool_calls(verdict)}",
        *verdict["reasons"],
    ]


def _tool_calls(verdict: dict[str, Any]) -> str:
    markup, parser = verdict["tool_markup"], verdict["tool_parser"]
    if markup is None:
        return "none in this template"
    readers = [f"vLLM ({parser})"] if parser else []
    readers += ["the embedded engine"] if verdict["embedded_reads_calls"] else []
    if len(readers) == 2:
        return f"{markup}, read by {' and '.join(readers)}"
    only = f"by {readers[0]} only" if readers else "by no engine"
    return f"{markup}, read {only}; elsewhere calls stay text, noted as tool_calls_unread"


def _engine(verdict: dict[str, Any]) -> list[str]:
    lines: list[str] = verdict["lines"]
    return lines


def _store(verdict: dict[str, Any]) -> list[str]:
    if verdict["broken"]:
        return [verdict["broken"]]
    if not verdict["exists"]:
        return [f"{verdict['store']} is not there yet; the proxy makes it"]
    return [f"{verdict['store']} has the newest schema ({verdict['revision']})"]


def _tokenizer(verdict: dict[str, Any]) -> list[str]:
    return [verdict["line"]]


_PARTS: Final = (
    ("template", _template),
    ("engine", _engine),
    ("tokenizer", _tokenizer),
    ("store", _store),
)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _say(line: str) -> None:
    out.print(line, highlight=False, soft_wrap=True)
