"""Checks of the recorded calls: none came, they failed, they lack ids, or they break."""

from __future__ import annotations

from typing import Final

from bridle.diagnosis.facts import Facts
from bridle.diagnosis.findings.finding import MOST, SOME, Finding, Severity, listed, share_of
from bridle.store.records import BreakReason


def no_calls(facts: Facts) -> Finding | None:
    if share_of(facts.without_calls.number, len(facts.sessions)) < MOST:
        return None
    return Finding(
        "no_calls",
        Severity.ERROR,
        "No call reached the proxy",
        f"{facts.without_calls.number} of {len(facts.sessions)} sessions ended without a call.",
        "Give the harness the session's base URL (`bridle run -- COMMAND` sets it and the "
        "environment variables of the providers). A harness whose address cannot be set is "
        "recorded with `bridle run --intercept`.",
        facts.without_calls.examples,
    )


_UNREACHABLE: Final = (
    "Start the engine, or start the proxy with the address at which it listens: `bridle status` "
    "prints the address and the state of each engine of the running proxy."
)


def calls_failed(facts: Facts) -> Finding | None:
    share = share_of(facts.failed.number, facts.calls)
    if share < SOME:
        return None
    return Finding(
        "calls_failed",
        Severity.ERROR if share >= MOST else Severity.WARNING,
        "Calls failed before a token arrived",
        f"{facts.failed.number} of {facts.calls} calls: {listed(facts.failures)}.",
        _UNREACHABLE
        if next(iter(facts.failures), "").startswith("upstream_unreachable")
        else "Check the engine's address with `bridle doctor --upstream URL`: it must be the base "
        "URL that has /v1/chat/completions below it, and must serve the model that is asked for.",
        facts.failed.examples,
    )


def no_token_ids(facts: Facts) -> Finding | None:
    share = share_of(facts.without_ids.number, facts.complete)
    if share < SOME:
        return None
    return Finding(
        "no_token_ids",
        Severity.ERROR if share >= MOST and facts.scored else Severity.WARNING,
        "Replies came without token ids, so no token can be trained",
        f"{facts.without_ids.number} of {facts.complete} complete calls have none, though they "
        "have text.",
        "Something between the proxy and the engine removes `return_token_ids` or its answer, or "
        "the upstream does not know it. Put the proxy directly in front of vLLM, and check with "
        "`bridle doctor --upstream URL`. Texts can still be exported for SFT.",
        facts.without_ids.examples,
    )


def quarantined(facts: Facts) -> Finding | None:
    if share_of(facts.quarantined.number, facts.calls) < SOME:
        return None
    return Finding(
        "quarantined",
        Severity.WARNING,
        "Replies contradict themselves and are never trained",
        f"{facts.quarantined.number} of {facts.calls} calls: {listed(facts.quarantines)}.",
        "Check the engine with `bridle doctor --upstream URL`; `bridle show SESSION` has each "
        "call's reason.",
        facts.quarantined.examples,
    )


def greedy(facts: Facts) -> Finding | None:
    if not facts.complete or share_of(facts.greedy.number, facts.complete) < MOST:
        return None
    return Finding(
        "temperature_zero",
        Severity.ERROR if facts.scored else Severity.WARNING,
        "Tokens were sampled at temperature 0: they cannot be trained, except to be imitated",
        f"{facts.greedy.number} of {facts.complete} complete calls have temperature 0.",
        "Pin the sampling, which overrides what the harness asks for: `bridle run --sampling "
        'policy -- COMMAND`, or `"settings": {"pin": {"temperature": 1.0}}` when sessions are '
        "created (docs/tasks.md).",
        facts.greedy.examples,
    )


def truncated(facts: Facts) -> Finding | None:
    share = share_of(facts.length.number, facts.complete)
    if share < 2 * SOME:
        return None
    return Finding(
        "truncated",
        Severity.ERROR if share >= MOST else Severity.WARNING,
        "Replies end at the token limit",
        f"{facts.length.number} of {facts.complete} complete calls finished with `length`.",
        "Raise the harness's own limit or the session's `cap` of `max_tokens` (docs/tasks.md), or "
        "the engine's --max-model-len. A model that never stops may have been given a wrong "
        "end-of-turn token: `bridle doctor --model DIR` prints those of its template.",
        facts.length.examples,
    )


def unlinked_roots(facts: Facts) -> Finding | None:
    if not facts.unlinked.number:
        return None
    return Finding(
        "unlinked_roots",
        Severity.WARNING,
        "Calls begin conversations of their own in a session that has another",
        f"{facts.unlinked.number} of {facts.calls} calls continue no other, and their kind does "
        "not explain it.",
        "Either one key serves several conversations, then give each a session of its own "
        "(docs/record.md), or the harness writes its history anew with every call, so that it "
        "shows no earlier reply: `bridle show SESSION` has what each call was sent. Such calls "
        "are trained all the same, each as a row.",
        facts.unlinked.examples,
    )


_TEMPLATE: Final = frozenset(
    {
        BreakReason.TEMPLATE_REWROTE_HISTORY.value,
        BreakReason.REASONING_DROPPED.value,
        BreakReason.TAIL_NOT_LOCAL.value,
        BreakReason.RETOKENISED.value,
    }
)

_OTHERWISE: Final = frozenset(
    {BreakReason.TOKENIZER_DIFFERS.value, BreakReason.ENGINE_RENDERS_OTHERWISE.value}
)


def template_rewrites(facts: Facts) -> Finding | None:
    if not facts.breaks or share_of(facts.broken.number, facts.continued) < SOME:
        return None
    first = next(iter(facts.breaks))
    causes = {
        BreakReason.TEMPLATE_REWROTE_HISTORY.value: "The chat template rewrites earlier turns",
        BreakReason.REASONING_DROPPED.value: "Earlier reasoning is left out of the next prompt",
        BreakReason.TOKENIZER_DIFFERS.value: "The engine has another tokenizer than the proxy",
        BreakReason.ENGINE_RENDERS_OTHERWISE.value: "The engine renders otherwise than the proxy",
        BreakReason.COMPACTED.value: "The harness compacts its history",
        BreakReason.EDITED.value: "The harness edits its history",
        BreakReason.REWORDED.value: "The harness puts replies into words of its own",
        BreakReason.TRUNCATED.value: "The harness cuts its history",
    }
    cause = causes.get(first, f"Turns do not continue each other in tokens ({first})")
    remedy = (
        "Give the proxy's `--tokenizer` the directory that the engine serves, and compare them "
        "with `bridle doctor --model DIR --upstream URL`. `GET /bridle/v1/engines` says which "
        "engine differs and where."
        if first in _OTHERWISE
        else "Start the proxy with `--tokenizer DIR`, and keep `continuation = exact`: then "
        "recorded tokens are sent and not rendered again. `bridle doctor --model DIR` prints what "
        "the template does to a conversation."
        if first in _TEMPLATE
        else "`bridle viewer` shows under Tree what each break changed. Rows that break are "
        "trained all the same, each token once; they cost time."
    )
    return Finding(
        first if first not in _TEMPLATE else "template_rewrites_history",
        Severity.WARNING,
        f"{cause}, so that one conversation becomes several rows",
        f"{facts.broken.number} of {facts.continued} continuing calls broke: "
        f"{listed(facts.breaks)}.",
        remedy,
        facts.broken.examples,
    )
