"""Check whether a machine can record exactly: its template, engine, tokenizer and store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.markup import tool_markup
from bridle.engine.contract.tokenizer import Tokenizer, TokenizerNotRead
from bridle.engine.vllm import Expectation, check_engine
from bridle.proxy.continuation.report import TemplateReport
from bridle.proxy.settings import engine_base


def examine_template(directory: Path) -> dict[str, Any]:
    """Return the verdict on a model directory's chat template.

    Its ``broken`` is the reason why the template cannot be used, or ``None``.
    """
    from bridle.proxy.continuation.continuation import Continuer

    if not directory.is_dir():
        return {"model": str(directory), "broken": f"there is no directory {directory}"}
    try:
        tokenizer = Tokenizer(directory)
        _ = tokenizer.chat_template_source  # raises when there is none
        report = Continuer(tokenizer).report
    except (TokenizerNotRead, TemplateError) as error:
        return {"model": str(directory), "broken": str(error)}
    words = report.reasons
    found: dict[str, Any] = {"model": str(directory), **asdict(report), "reasons": list(words)}
    found["role_changes"] = [*report.roles.in_words(), *_other_changes(report)]
    found["end_of_turn_ids"] = sorted(report.end_of_turn_ids)
    found["broken"] = None if report.usable else words[0]
    return found | _tool_calls(tokenizer)


def _other_changes(report: TemplateReport) -> Iterator[str]:
    if report.refused_efforts:
        refused = ", ".join(report.refused_efforts)
        yield f"efforts that are refused, and become the nearest: {refused}"
    if report.bare_tools_refused:
        yield "tools without parameters are refused: each gets an empty schema"


def examine_pair(template: dict[str, Any], harness: str) -> dict[str, Any]:
    """Check whether a coding harness can work on an examined template.

    ``template`` is the sound verdict of :func:`examine_template`. Every coding harness declares
    tools in its first call, and sends their results in its second.
    """
    roles = template["roles"]
    broken = None
    if not roles["results"]:
        broken = (
            f"the template refuses tool calls and their results, so {harness} is refused at its "
            "first call; serve the model with a template that has them (vLLM: --chat-template "
            "FILE) and name its folder here and to the proxy"
        )
    elif template["calls_vanish"] or not roles["tools_shown"]:
        broken = (
            f"the template leaves out the tools that {harness} declares, or the calls of earlier "
            "turns, so the model cannot use them; serve the model with a template that shows them"
        )
    lines = [broken] if broken else [f"{harness} works on this template, changed as under roles"]
    return {"harness": harness, "lines": lines, "broken": broken}


def _tool_calls(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the markup of the model's tool calls, and which engines read it."""
    from bridle.engine.serve.markup import READ
    from bridle.engine.vllm.parsers import choose_parsers

    markup = tool_markup(tokenizer)
    return {
        "tool_markup": markup.name if markup else None,
        "tool_parser": choose_parsers(tokenizer.directory).tool,
        "embedded_reads_calls": markup is not None and markup.name in READ,
    }


def examine_engine(
    url: str, *, api_key: str | None = None, private_network: bool = False
) -> dict[str, Any]:
    """Check whether the engine at ``url`` offers what recording and training need."""
    root = engine_base(url)
    if _is_proxy(root):
        found = f"{root} is a Bridle proxy, not an engine: name the engine behind it"
        return {"upstream": root, "checks": [], "lines": [found], "broken": found}
    expect = Expectation(private_network=private_network)
    checks = check_engine(root, expect=expect, api_key=api_key)
    failed = [check.name for check in checks if check.outcome == "failed"]
    return {
        "upstream": root,
        "checks": [asdict(check) for check in checks],
        "lines": [check.line for check in checks],
        "broken": ", ".join(failed) or None,
    }


def _is_proxy(root: str) -> bool:
    """Return whether Bridle's readiness probe answers there; only it reports circuits."""
    try:
        reply = httpx.get(f"{root}/readyz", trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(reply, dict) and {"status", "circuits"} <= reply.keys()


def examine_tokenizer(directory: Path, url: str, *, api_key: str | None = None) -> dict[str, Any]:
    """Check whether an engine makes the same ids of a conversation as a tokenizer.

    The engine is at ``url`` and the tokenizer in ``directory``. Both must have been examined by
    themselves. One token is sampled, because only the prompt of a real call shows an engine that
    does not render by the template.
    """
    from bridle.proxy.engines.rendering import PROBE

    tokenizer = Tokenizer(directory)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    root = engine_base(url)
    with httpx.Client(base_url=root, headers=headers, timeout=30, trust_env=False) as engine:
        try:
            (card, *_) = engine.get("/v1/models").raise_for_status().json()["data"]
            asked = {"model": card["id"], "messages": PROBE, "max_tokens": 1}
            asked["return_token_ids"] = True
            reply = engine.post("/v1/chat/completions", json=asked).raise_for_status()
            ids = reply.json()["prompt_token_ids"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            silent = f"the engine returns no ids: {error}"
            return {"agrees": None, "broken": None, "lines": [silent]}
    agrees = ids == tokenizer.encode(tokenizer.render(PROBE))
    line = (
        "the engine makes the same ids of a conversation"
        if agrees
        else f"the engine makes other ids of a conversation than {directory}: it has another "
        "tokenizer or template, or does not render by the template, so that exact continuation "
        "would be nonsense; name the directory that it serves"
    )
    return {"agrees": agrees, "broken": None if agrees else line, "lines": [line]}


def examine_store(url: str) -> dict[str, Any]:
    """Check whether the store can be reached and has the newest schema. Nothing is changed."""
    from bridle.store.errors import StoreUnavailable
    from bridle.store.schema.database import database_url, newest_revision, revision

    try:
        parsed = database_url(url)
    except StoreUnavailable as error:
        return {"store": None, "broken": str(error)}
    shown = parsed.render_as_string(hide_password=True)
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists():
        return {"store": shown, "exists": False, "migrated": False, "broken": None}
    newest = newest_revision()
    try:
        found = revision(url)
    except sqlalchemy.exc.SQLAlchemyError as error:
        return {"store": shown, "broken": f"it cannot be reached: {error.__cause__ or error}"}
    broken = None if found == newest else f"its schema is {found or 'not ours'}, not {newest}"
    return {
        "store": shown,
        "exists": True,
        "revision": found,
        "migrated": found == newest,
        "broken": broken,
    }
