"""``bridle doctor``: examine a setup, or explain the result of a recorded session or run.

A setup is examined for what exact recording needs, and for what the model's template does to a
conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bridle.cli.options import JsonOption, ProxyOption, StoreOption, base_urls, tokenizer_path
from bridle.cli.reading import one_session, reader
from bridle.cli.terminal import out, print_json
from bridle.errors import UsageError
from bridle.keys import UPSTREAM_KEY_VARIABLE
from bridle.run.environment import key_in

if TYPE_CHECKING:
    from bridle.diagnosis.findings import Finding


def doctor(
    store: StoreOption,
    proxy: ProxyOption,
    about: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION|RUN]", help="Explain a recorded session or run; `last`: the newest."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=tokenizer_path,
            metavar="MODEL",
            help="Directory or Hub name; its template is examined.",
        ),
    ] = None,
    upstream: Annotated[
        str | None, typer.Option(callback=base_urls, help="The engine's base URL.")
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(help="A coding harness: whether it can work on the template of --model."),
    ] = None,
    private_network: Annotated[
        bool,
        typer.Option(
            "--private-network", help="State that only trusted machines reach the engine."
        ),
    ] = False,
    deployment: Annotated[
        bool,
        typer.Option("--deployment", help="Examine keys, disk, versions and clock too."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Examine template, engine and store, or explain a session or run.

    Without arguments, it examines the running proxy with its engines, and the harnesses and
    versions that are here. Exits with 1 when something is broken.
    """
    if about is not None:
        if model is not None or upstream is not None:
            raise UsageError("name a session or run, or --model and --upstream: not both")
        _explain(store, about, json)
        return
    from bridle.run.examination import (
        examine_engine,
        examine_store,
        examine_tokenizer,
    )

    found = _of_model(model, harness)
    if model is None and upstream is None:
        found |= _of_machine(proxy)
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
    from bridle.run import deployment as machine

    if (learned := machine.examine_upstreams(proxy)) is not None:
        found["upstreams"] = learned
    if deployment:
        found["keys"] = machine.examine_keys()
        found["disk"] = machine.examine_disk(store)
        found.setdefault("versions", machine.examine_versions())
        found["clock"] = machine.examine_clock(proxy)
    found["broken"] = [part for part, verdict in found.items() if verdict["broken"]]
    if json:
        print_json(found)
    else:
        _print(found)
    if found["broken"]:
        raise typer.Exit(1)


def _of_model(model: Path | None, harness: str | None) -> dict[str, Any]:
    """Return the verdicts on a model's template, and on a harness that works on it."""
    from bridle.harnesses.adapters import PROGRAMS
    from bridle.run.examination import examine_pair, examine_template

    names = sorted(PROGRAMS.values())
    if harness is not None and harness not in names:
        raise UsageError(f"no coding harness is called {harness}: choose of {', '.join(names)}")
    if model is None:
        if harness is not None:
            raise UsageError("--harness is examined with the template of --model: name that too")
        return {}
    template = examine_template(model)
    if harness is None or template["broken"]:
        return {"template": template}
    return {"template": template, "harness": examine_pair(template, harness)}


def _of_machine(proxy: str) -> dict[str, Any]:
    """Return the verdicts on the running proxy, and on the harnesses and versions that are here."""
    from bridle.run.deployment import examine_harnesses, examine_proxy, examine_versions

    return {
        "proxy": examine_proxy(proxy),
        "harnesses": examine_harnesses(),
        "versions": examine_versions(),
    }


def _explain(store: str, about: str, json: bool) -> None:
    from bridle.diagnosis.findings import Severity, findings_of_run, findings_of_session

    with reader(store) as source:
        if about in {run.id for run in source.runs()}:
            subject, found = f"run {about}", findings_of_run(source, about)
        else:
            session = one_session(source, about).id
            subject, found = f"session {session}", findings_of_session(source, session)
    if json:
        print_json({"about": subject, "findings": [asdict(finding) for finding in found]})
    else:
        print_findings(subject, found)
    if any(finding.severity is Severity.ERROR for finding in found):
        raise typer.Exit(1)


def print_findings(subject: str, found: Sequence[Finding]) -> None:
    """Print each finding with its evidence and remedy.

    The first finding is the cause of the others.
    """
    if not found:
        out.print(f"{subject}: nothing is wrong in the record.")
        return
    for number, finding in enumerate(found):
        out.print(f"{'' if number == 0 else chr(10)}{finding.severity.upper():7}  {finding.cause}")
        out.print(f"         {finding.evidence}")
        out.print(f"         {finding.remedy}")
        if finding.calls:
            out.print(f"         see {', '.join(finding.calls)}")


def _print(found: dict[str, Any]) -> None:
    for part in filter(found.__contains__, _ORDER):
        verdict = found[part]
        out.print(f"{'BROKEN' if verdict['broken'] else 'ok':6}  {part}")
        for line in _LINES[part](verdict) if part in _LINES else verdict["lines"]:
            out.print(f"        {line}")


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
        *(f"roles: {line}" for line in verdict["role_changes"] or ["sent as they are"]),
        *verdict["reasons"],
    ]


def _tool_calls(verdict: dict[str, Any]) -> str:
    markup, parser = verdict["tool_markup"], verdict["tool_parser"]
    if markup is None:
        return "none in this template"
    if verdict["embedded_reads_calls"]:
        return f"{markup}, read by vLLM ({parser}) and the embedded engine"
    return (
        f"{markup}, read by vLLM ({parser}) only; elsewhere calls stay text, noted as "
        "tool_calls_unread"
    )


def _store(verdict: dict[str, Any]) -> list[str]:
    if verdict["broken"]:
        return [verdict["broken"]]
    if not verdict["exists"]:
        return [f"{verdict['store']} is not there yet; the proxy makes it"]
    return [f"{verdict['store']} has the newest schema ({verdict['revision']})"]


_ORDER: Final = (
    *("template", "harness", "engine", "tokenizer", "proxy", "store", "upstreams"),
    *("harnesses", "keys", "disk", "versions", "clock"),
)
_LINES: Final[dict[str, Callable[[dict[str, Any]], list[str]]]] = {
    "template": _template,
    "store": _store,
}
"""The functions that make the lines of verdicts without ``lines``."""


def _yes(value: bool) -> str:
    return "yes" if value else "no"
