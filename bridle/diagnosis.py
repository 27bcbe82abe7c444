"""What stands between a machine and exact recording: template, engine and store, each asked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy

from engine import contract
from engine.tokenizer import TemplateError, Tokenizer

PROBE = [{"role": "user", "content": "Say one word."}]
TIMEOUT_S = 60.0


def examine_template(directory: Path) -> dict[str, Any]:
    """The verdict on a model directory's chat template; ``broken`` says why there is none."""
    from proxy.continuation import Continuer

    try:
        tokenizer = Tokenizer(directory)
        _ = tokenizer.chat_template_source  # raises when there is none
        report = Continuer(tokenizer).report
    except TemplateError as error:
        return {"model": str(directory), "broken": str(error)}
    except Exception as error:
        # The tokenizers library raises bare exceptions for files that it cannot read.
        if type(error) is not Exception and not isinstance(error, OSError):
            raise
        return {"model": str(directory), "broken": f"no tokenizer there: {error}"}
    words = report.reasons
    found: dict[str, Any] = {"model": str(directory), **asdict(report), "reasons": list(words)}
    found["end_of_turn_ids"] = sorted(report.end_of_turn_ids)
    found["broken"] = None if report.usable else words[0]
    return found


def examine_engine(url: str, *, api_key: str | None = None, model: str | None = None) -> Any:
    """Whether the engine answers, with token ids and logprobs, and takes exact prompts."""
    root = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    found: dict[str, Any] = {"upstream": root, "broken": None}
    with httpx.Client(base_url=root, headers=headers, timeout=TIMEOUT_S, trust_env=False) as http:
        try:
            served = http.get(contract.MODELS).raise_for_status().json()["data"]
            found["model"] = model or served[0]["id"]
            reply = _asked(http, found["model"])
            ids: list[int] = reply.get("prompt_token_ids") or []
            exact = _asked(http, found["model"], ids) if ids else {}
        except httpx.HTTPStatusError as error:
            return found | {"broken": f"it refused: {error.response.text[:300]}"}
        except httpx.HTTPError as error:
            return found | {"broken": f"it does not answer: {error}"}
        except (ValueError, LookupError, TypeError) as error:
            return found | {"broken": f"its reply is not the engine contract's: {error!r}"}
    choice = reply["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    scores = [entry.get("logprob", contract.MISSING_LOGPROB) for entry in entries]
    sampled = choice.get("token_ids") or []
    found["token_ids"] = bool(ids) and bool(sampled)
    found["logprobs"] = bool(sampled) and len(scores) == len(sampled)
    found["logprobs"] &= all(score > contract.MISSING_LOGPROB for score in scores)
    found["exact_prompts"] = bool(ids) and exact.get("prompt_token_ids") == _longer(ids)
    lacking = [name for name in ("token_ids", "logprobs", "exact_prompts") if not found[name]]
    if lacking:
        found["broken"] = f"it does not give {', '.join(lacking)}"
    return found


def _asked(http: httpx.Client, model: str, ids: list[int] | None = None) -> dict[str, Any]:
    """A reply of one token; to the prompt ``ids`` and one more when they are given, so that an
    engine that renders the messages instead is found out."""
    body: dict[str, Any] = {
        "model": model,
        "messages": PROBE,
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
    }
    if ids is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": _longer(ids)}
    reply = http.post(contract.CHAT_COMPLETIONS, json=body).raise_for_status().json()
    if not isinstance(reply, dict) or not reply.get("choices"):
        raise ValueError("no choices")
    return reply


def _longer(ids: list[int]) -> list[int]:
    return [*ids, ids[-1]]


def examine_store(url: str) -> dict[str, Any]:
    """Whether the store can be reached and has the newest schema. Changes nothing."""
    from store.database import database_url, newest_revision, revision

    parsed = sqlalchemy.make_url(database_url(url))
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
