"""Why nothing trains, why a conversation became several rows, why a run is slow: answers from the
record, each with its evidence and a remedy.

:func:`findings` is a pure function of :class:`bridle.store.reading.facts.Facts`. What causes the
others comes first: a call without token ids has no trainable token, whatever else is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Final

from bridle.store.errors import NotFound
from bridle.store.reading.facts import Facts, read_facts
from bridle.store.reading.queries import Reader
from bridle.store.records import BreakReason

MOST: Final = 0.5
"""From this share on what is wrong with calls or sessions explains the whole."""
SOME: Final = 0.1
LARGEST_GAP: Final = 0.05
"""Mean |engine logprob − trainer logprob| in nats from which on the weights are taken to differ.
Equal weights in other kernels and precisions differ by 0.001 to 0.02."""
SLOW_SHARE: Final = 0.7
"""Share of a step's time from which on a stage is named as what the run waits for."""


class Severity(StrEnum):
    ERROR = "error"
    """Nothing, or nearly nothing, can be trained while it lasts."""
    WARNING = "warning"
    """Tokens or time are lost."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer."""

    name: str
    """Stable snake_case word."""
    severity: Severity
    cause: str
    evidence: str
    remedy: str
    calls: tuple[str, ...] = ()
    """Some of the calls, or sessions, that it rests on."""


def findings(facts: Facts) -> list[Finding]:
    """All that the record shows to be wrong, causes before what they cause."""
    return [found for check in _CHECKS if (found := check(facts)) is not None]


def findings_of_session(reader: Reader, session_id: str) -> list[Finding]:
    """Raises :class:`bridle.store.errors.NotFound`."""
    reader.session(session_id)
    return findings(read_facts(reader, session=session_id))


def findings_of_run(reader: Reader, run_id: str) -> list[Finding]:
    """Raises :class:`bridle.store.errors.NotFound`."""
    return findings(read_facts(reader, run=reader.run(run_id)))


def findings_of(reader: Reader, name: str) -> list[Finding]:
    """Of the session or the run with this id.

    Raises :class:`bridle.store.errors.NotFound` when there is neither.
    """
    try:
        return findings_of_run(reader, name)
    except NotFound:
        return findings_of_session(reader, name)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{reason} ({number})" for reason, number in list(counts.items())[:3])


def _no_calls(facts: Facts) -> Finding | None:
    if _share(facts.without_calls.number, len(facts.sessions)) < MOST:
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


def _calls_failed(facts: Facts) -> Finding | None:
    share = _share(facts.failed.number, facts.calls)
    if share < SOME:
        return None
    return Finding(
        "calls_failed",
        Severity.ERROR if share >= MOST else Severity.WARNING,
        "Calls failed before a token arrived",
        f"{facts.failed.number} of {facts.calls} calls: {_listed(facts.failures)}.",
        "Check the engine's address with `bridle doctor --upstream URL`: it must be the base URL "
        "that has /v1/chat/completions below it, and must serve the model that is asked for.",
        facts.failed.examples,
    )


def _no_token_ids(facts: Facts) -> Finding | None:
    share = _share(facts.without_ids.number, facts.complete)
    if share < SOME:
        return None
    return Finding(
        "no_token_ids",
        Severity.ERROR if share >= MOST else Severity.WARNING,
        "Replies came without token ids, so no token can be trained",
        f"{facts.without_ids.number} of {facts.complete} complete calls have none, though they "
        "have text.",
        "Something between the proxy and the engine removes `return_token_ids` or its answer, or "
        "the upstream does not know it. Put the proxy directly in front of vLLM, and check with "
        "`bridle doctor --upstream URL`. Texts can still be exported for SFT.",
        facts.without_ids.examples,
    )


def _quarantined(facts: Facts) -> Finding | None:
    if _share(facts.quarantined.number, facts.calls) < SOME:
        return None
    return Finding(
        "quarantined",
        Severity.WARNING,
        "Replies contradict themselves and are never trained",
        f"{facts.quarantined.number} of {facts.calls} calls: {_listed(facts.quarantines)}.",
        "Check the engine with `bridle doctor --upstream URL`; `bridle show SESSION` has each "
        "call's reason.",
        facts.quarantined.examples,
    )


def _other_weights(facts: Facts) -> Finding | None:
    gaps = [m.value for m in facts.metrics.get("update/logprob_gap", ())]
    wrong = [p for p in facts.policies if (p.logprob_gap or 0) > LARGEST_GAP]
    unverified = [p for p in facts.policies if not p.verified]
    evidence = []
    if gaps and max(gaps[-3:]) > LARGEST_GAP:
        evidence.append(
            f"The engine's logprobs differ from the trainer's by {gaps[-1]:.3g} nats a token in "
            f"the last step ({gaps[0]:.3g} in the first)"
        )
    if wrong:
        versions = ", ".join(str(p.version) for p in wrong[-3:])
        evidence.append(f"the check after publishing found other logprobs at version {versions}")
    if not evidence:
        return None
    if unverified:
        evidence.append(f"{len(unverified)} published versions were never verified")
    return Finding(
        "engine_weights_differ",
        Severity.ERROR,
        "The engine samples from other weights than the trainer trains",
        "; ".join(evidence) + ".",
        "Stop, and publish again: `bridle doctor --upstream URL --model DIR` compares tokenizer "
        "and template. On vLLM's CPU build a model with tied embeddings serves a stale output "
        "layer after a reload: untie them. For a quantised or bfloat16 engine set an importance "
        "correction in the loss.",
    )


def _greedy(facts: Facts) -> Finding | None:
    if _share(facts.greedy.number, facts.complete) < MOST:
        return None
    return Finding(
        "temperature_zero",
        Severity.ERROR,
        "Tokens were sampled at temperature 0, so a group's sessions do not differ",
        f"{facts.greedy.number} of {facts.complete} complete calls have temperature 0.",
        'Pin it when sessions are created: `"settings": {"pin": {"temperature": 1.0}}` '
        "(docs/tasks.md) overrides what the harness asks for.",
        facts.greedy.examples,
    )


def _truncated(facts: Facts) -> Finding | None:
    share = _share(facts.length.number, facts.complete)
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


def _no_reward(facts: Facts) -> Finding | None:
    ended = sum(number for name, number in facts.outcomes.items() if name != "open")
    share = _share(facts.without_reward.number, ended)
    if share < SOME:
        return None
    down = facts.outcomes.get("infrastructure", 0)
    also = f" {down} of them were given up as infrastructure failures." if down else ""
    return Finding(
        "no_reward",
        Severity.ERROR if share >= MOST else Severity.WARNING,
        "Sessions ended without a reward: the verifier did not score them",
        f"{facts.without_reward.number} of {ended} ended sessions have no reward.{also}",
        "Run the verifier by hand on one of them. A verifier that raises or times out leaves the "
        "session without a reward on purpose: no missing reward counts as 0. Rewards may come "
        "late: `bridle reward SESSION VALUE`.",
        facts.without_reward.examples,
    )


def _groups(facts: Facts) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for session in facts.sessions:
        if session.group is not None and session.reward is not None:
            found.setdefault(session.group, []).append(session.reward)
    return found


def _rewarded(facts: Facts) -> int:
    return sum(session.reward is not None for session in facts.sessions)


def _no_groups(facts: Facts) -> Finding | None:
    alone = [s for s in facts.sessions if s.reward is not None]
    members = _groups(facts)
    alone = [s for s in alone if s.group is None or len(members[s.group]) < 2]
    if len(facts.sessions) < 2 or _share(len(alone), _rewarded(facts)) < MOST:
        return None
    return Finding(
        "no_groups",
        Severity.ERROR,
        "Sessions are compared with none of their task, so every advantage is zero",
        f"{len(alone)} of {_rewarded(facts)} rewarded sessions are in no group, or alone in one.",
        "Run each task several times in one group: `--group-size 8` of `bridle rollout` and "
        "`bridle train`, or `group_id` when your own code creates sessions.",
        tuple(session.id for session in alone[:5]),
    )


def _equal_rewards(facts: Facts) -> Finding | None:
    groups = [values for values in _groups(facts).values() if len(values) > 1]
    equal = [values for values in groups if min(values) == max(values)]
    if _share(len(equal), len(groups)) < MOST:
        return None
    high = sum(values[0] > 0 for values in equal)
    return Finding(
        "rewards_equal",
        Severity.ERROR if len(equal) == len(groups) else Severity.WARNING,
        "All sessions of a group have the same reward, so the advantage is zero",
        f"{len(equal)} of {len(groups)} groups have no spread: {high} with a positive reward in "
        f"every session, {len(equal) - high} without.",
        "Tasks that always fail are too hard and those that always succeed too easy: choose tasks "
        "that are solved sometimes, enlarge the group, or let the verifier give partial credit.",
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


def _template_rewrites(facts: Facts) -> Finding | None:
    if not facts.breaks or _share(facts.broken.number, facts.continued) < SOME:
        return None
    first = next(iter(facts.breaks))
    causes = {
        BreakReason.TEMPLATE_REWROTE_HISTORY.value: "The chat template rewrites earlier turns",
        BreakReason.REASONING_DROPPED.value: "Earlier reasoning is left out of the next prompt",
        BreakReason.TOKENIZER_DIFFERS.value: "The engine has another tokenizer than the proxy",
        BreakReason.ENGINE_RENDERS_OTHERWISE.value: "The engine renders otherwise than the proxy",
        BreakReason.COMPACTED.value: "The harness compacts its history",
        BreakReason.EDITED.value: "The harness edits its history",
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
        f"{_listed(facts.breaks)}.",
        remedy,
        facts.broken.examples,
    )


def _stale(facts: Facts) -> Finding | None:
    stale = sum(
        tokens for (_, reason), tokens in facts.account.fates.items() if reason == "version_stale"
    )
    dropped = sum(m.value for m in facts.metrics.get("sessions/dropped/stale", ()))
    collected = sum(m.value for m in facts.metrics.get("sessions/collected", ()))
    if _share(stale, facts.account.captured) < SOME and (dropped < SOME * collected or not dropped):
        return None
    evidence = []
    if stale:
        evidence.append(
            f"{stale} of {facts.account.captured} sampled tokens are of versions too old to train"
        )
    if dropped:
        of = f"{dropped:.0f} of {collected:.0f} collected sessions"
        evidence.append(f"{of} were dropped as stale")
    return Finding(
        "stale_tokens",
        Severity.ERROR if _share(stale, facts.account.captured) >= MOST else Severity.WARNING,
        "Tokens were sampled from a policy version too old to train",
        "; ".join(evidence) + ".",
        "Raise `max_staleness` (training settings) with an importance correction in the loss, "
        "or sample fewer sessions ahead: a lower concurrency, or more engines.",
    )


def _nothing_trained(facts: Facts) -> Finding | None:
    untrained = {key: n for key, n in facts.account.fates.items() if key[0] != "trained" and n}
    trained = facts.account.fates.get(("trained", ""), 0)
    total = trained + sum(untrained.values())
    if not total or _share(total - trained, total) < MOST:
        return None
    ordered = sorted(untrained.items(), key=lambda item: -item[1])
    shown = {reason: number for (_, reason), number in ordered}
    return Finding(
        "tokens_excluded",
        Severity.WARNING,
        "The rules leave most sampled tokens out of training",
        f"{total - trained} of {total} accounted tokens: {_listed(shown)}.",
        "The rules are those of the run (`--rules`, docs/data.md). A kind that was derived wrongly "
        "is set with `bridle kind`.",
    )


def _growing_gap(facts: Facts) -> Finding | None:
    gaps = [m.value for m in facts.metrics.get("update/logprob_gap", ())]
    if len(gaps) < 6:
        return None
    third = len(gaps) // 3
    before, after = fmean(gaps[:third]), fmean(gaps[-third:])
    if after < 2 * before or after > LARGEST_GAP:
        return None
    return Finding(
        "gap_grows",
        Severity.WARNING,
        "The gap between engine and trainer grows",
        f"{before:.3g} nats a token in the first third of the steps, {after:.3g} in the last.",
        "Serve in the trainer's precision, publish after every step, and use truncated importance "
        "weights. Sharper distributions widen the gap too: look at the entropy.",
    )


def _slow(facts: Facts) -> Finding | None:
    stages = {
        name.removeprefix("seconds/"): sum(m.value for m in values)
        for name, values in facts.metrics.items()
        if name.startswith("seconds/")
    }
    total = sum(stages.values())
    if total <= 0:
        return None
    stage = max(stages, key=lambda name: stages[name])
    share = stages[stage] / total
    if share < SLOW_SHARE:
        return None
    advice = {
        "collect": "Collect while training (`max_staleness` of 1 or more), run more sessions at "
        "once, or add engines; a long wait for the first token means that prompts are not cached.",
        "update": "Check with `bridle ablate` how much prefixes share; train adapters, or use "
        "more devices.",
    }
    times = ""
    if facts.wait is not None and facts.reply is not None:
        times = (
            f" A call waits {facts.wait:.2g} s for its first token and takes {facts.reply:.2g} s "
            "from there."
        )
    return Finding(
        "slow_" + stage,
        Severity.NOTE,
        f"Steps wait for one stage: {stage}",
        f"{stage} takes {100 * share:.0f} % of {total:.0f} s.{times}",
        advice.get(stage, "Look at the stage's figures on the run's page of `bridle viewer`."),
    )


_CHECKS: Final[tuple[Callable[[Facts], Finding | None], ...]] = (
    _no_calls,
    _calls_failed,
    _no_token_ids,
    _quarantined,
    _other_weights,
    _greedy,
    _truncated,
    _no_reward,
    _stale,
    _no_groups,
    _equal_rewards,
    _nothing_trained,
    _template_rewrites,
    _growing_gap,
    _slow,
)
"""Causes before what they cause."""
