"""A benchmark of genuine tokenizers and templates through the proxy: what is exact, by family.

Each family's conversation of eight calls is led through the proxy in every dialect, once with exact
continuation and once with rendered history. The verdicts of the proxy's template probe are compared
with renderings of the same conversation.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bridle.bench.families import FAMILIES, Family, model_directory
from bridle.bench.model_clients import CLIENTS, ClientRefused
from bridle.bench.model_conversation import (
    SYSTEM,
    PlayedModel,
    result,
    steps_for,
)
from bridle.bench.played_engine import app_of
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.transport import ServerThread
from bridle.engine.vllm.parsers import choose_parsers
from bridle.proxy.continuation.continuation import Continuer, TemplateReport
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.packages import PackageNotFetched
from bridle.reconstruct.session import LoadedSession
from bridle.store.reading.queries import Reader
from bridle.store.records import BreakReason, Continuation


@dataclass(frozen=True, slots=True)
class Shown:
    """The properties of a template that its renderings of the conversation show."""

    system: bool
    tools: str
    """The treatment of tool calls and results: ``shown``, ``vanish`` or ``refused``."""
    parallel: bool
    text_beside_calls: bool
    bare_calls: bool
    ids_refused: bool
    """True if the template refuses ids as long as a client's."""
    thinks: bool
    prefix_preserving: bool

    def verdicts(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "tools": self.tools == "shown",
            "calls_vanish": self.tools == "vanish",
            "parallel_calls": self.parallel,
            "text_beside_calls": self.text_beside_calls,
            "bare_calls": self.bare_calls and self.tools == "shown",
            "ids_refused": self.ids_refused,
            "prefix_preserving": self.prefix_preserving,
        }


@dataclass(slots=True)
class Outcome:
    """The results of one continuation mode over all dialects."""

    rows: int = 0
    sessions: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def add(self, session: LoadedSession) -> None:
        self.sessions += 1
        self.rows += len(session.tree.branches())
        self.breaks.update(str(call.break_reason) for call in session.calls if call.break_reason)

    def figures(self) -> dict[str, Any]:
        return {
            "rows_per_session": round(self.rows / max(1, self.sessions), 2),
            "breaks": sum(self.breaks.values()),
            "unexplained": self.breaks[BreakReason.UNEXPLAINED],
            "reasons": dict(self.breaks),
            "errors": self.errors,
        }


def measure(names: Iterable[str] = FAMILIES) -> dict[str, Any]:
    """Return the figures by family, or ``{"not_fetched": REASON}`` if it cannot be fetched."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = measure_directory(model_directory(name), FAMILIES[name])
        except PackageNotFetched as error:
            found[name] = {"not_fetched": str(error)}
    return found


def measure_directory(directory: Path, family: Family) -> dict[str, Any]:
    """Return the figures of one model directory, played as ``family``."""
    tokenizer = Tokenizer(directory)
    report = Continuer(tokenizer).report
    shown = look(tokenizer, family)
    model = played(tokenizer, family, shown)
    exact, rendered = _lead(model, directory, shown.system)
    wrong = _wrong(report, shown)
    return {
        "verdict_right": not wrong,
        "verdict_wrong": wrong,
        "tools": shown.tools,
        "thinks": shown.thinks,
        "calls": len(model.steps),
        "exact": exact.figures(),
        "outside_differences": len(model.differences),
        "differences": model.differences[:4],
        "rendered": rendered.figures(),
        "stand_in": family.stand_in,
        "parsers": asdict(choose_parsers(directory)),
        "reasons": list(report.reasons),
    }


def played(tokenizer: Tokenizer, family: Family, shown: Shown) -> PlayedModel:
    """Return the family's model in a conversation that its template supports."""
    parallel = shown.parallel or shown.tools == "vanish"
    steps = steps_for(shown.tools != "refused", parallel, bare=shown.bare_calls)
    return PlayedModel(tokenizer, family, steps, shown.thinks)


def look(tokenizer: Tokenizer, family: Family) -> Shown:
    """Return what the renderings of the conversation show.

    No part of the proxy's own probe is used.
    """
    thinks = "think" in tokenizer.chat_template_source.lower()
    with_tools = PlayedModel(tokenizer, family, steps_for(True, True), thinks)
    single = PlayedModel(tokenizer, family, steps_for(True, False), thinks)
    plain = PlayedModel(tokenizer, family, steps_for(False, False), thinks)
    text = _try(plain, plain.request(1))
    assert text is not None, "not even a plain conversation is rendered"
    called = _try(single, single.request(1))
    if called is None:
        tools = "refused"
    else:
        seen = ["look_up", *single.steps[0].words(0), result(single.steps[0].words(0)[0]).strip()]
        later = called.replace(_try(single, single.request(0)) or "", "")
        tools = "shown" if all(each in later for each in seen) else "vanish"
    bare = _try(single, single.request(2)) is not None
    if not bare:
        with_tools.steps = steps_for(True, True, bare=False)
        single.steps = steps_for(True, False, bare=False)
    both = _try(with_tools, with_tools.request(2)) or ""
    words = with_tools.steps[1].words(1)
    parallel = tools == "shown" and all(
        word in both.replace(result(word).strip(), "") for word in words
    )
    system = _try(plain, [{"role": "system", "content": SYSTEM}, *plain.request(0)]) or ""
    model = plain if tools == "refused" else (with_tools if parallel else single)
    return Shown(
        system="SysRule" in system,
        tools=tools,
        parallel=parallel,
        text_beside_calls=tools == "shown" and single.steps[0].says(0) in (called or ""),
        bare_calls=bare,
        ids_refused=_refuses_long_ids(tokenizer, family),
        thinks=thinks,
        prefix_preserving=_grows(plain) and _grows(model if tools == "shown" else plain),
    )


def _grows(model: PlayedModel) -> bool:
    """Return whether each request's rendering is the beginning of the next one's.

    A rendering includes the generation prompt.
    """
    texts = [_try(model, model.request(at)) for at in range(len(model.steps))]
    kept = [text for text in texts if text is not None]
    return all(later.startswith(text.rstrip()) for text, later in itertools.pairwise(kept))


def _refuses_long_ids(tokenizer: Tokenizer, family: Family) -> bool:
    """Return whether ids in the form of OpenAI's are refused while short ones are accepted."""
    kinds = {
        kind: PlayedModel(
            tokenizer,
            Family(family.template, family.tokenizer, family.model_type, family.eos, call_ids=kind),
            steps_for(True, False),
        )
        for kind in ("openai", "nine")
    }
    return [_try(model, model.request(1)) is None for model in kinds.values()] == [True, False]


def _try(model: PlayedModel, messages: list[dict[str, Any]]) -> str | None:
    try:
        return model.render(messages)
    except TemplateError:
        return None


def _wrong(report: TemplateReport, shown: Shown) -> list[str]:
    return [
        f"{name}: the probe says {getattr(report, name, 'nothing')}, the renderings {value}"
        for name, value in shown.verdicts().items()
        if getattr(report, name, None) != value
    ]


def _lead(model: PlayedModel, directory: Path, system: bool) -> tuple[Outcome, Outcome]:
    """Lead the conversation in every dialect, with exact continuation and with rendered history."""
    outcomes = {mode: Outcome() for mode in Continuation}
    with tempfile.TemporaryDirectory() as scratch:
        store = f"sqlite:///{scratch}/bench.db"
        with (
            ServerThread(app_of(model)) as engine,
            ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=directory)) as proxy,
            httpx.Client(timeout=120, trust_env=False) as http,
        ):
            for mode, outcome in outcomes.items():
                for dialect, lead in CLIENTS.items():
                    name = f"{mode}-{dialect}"
                    new = {"name": name, "continuation": mode.value}
                    http.post(f"{proxy.base_url}/bridle/v1/sessions", json=new).raise_for_status()
                    try:
                        lead(http, f"{proxy.base_url}/s/{name}", model.steps, system)
                    except ClientRefused as error:
                        outcome.errors.append(f"{dialect}: {error}")
        with Reader(store) as reader:
            for session in reader.sessions():
                loaded = LoadedSession.load(reader, session.id)
                outcomes[session.continuation].add(loaded)
    return outcomes[Continuation.EXACT], outcomes[Continuation.RENDERED]
