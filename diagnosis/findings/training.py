"""Checks of training: rewards, groups, weights, stale tokens and time."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Final

from bridle.diagnosis.call_facts import Counted
from bridle.diagnosis.facts import Facts
from bridle.diagnosis.findings.finding import (
    MOST,
    SOME,
    Finding,
    Severity,
    listed,
    share_of,
    summed,
)
from bridle.store.schema.accounts import HELD_OUT

ROUNDING: Final = 1e-4
"""A gap in nats below which engine and trainer differ by rounding alone."""
LARGEST_GAP: Final = 0.05
"""The mean |engine logprob − trainer logprob| in nats above which the weights are taken to differ.
Equal weights in other kernels and precisions differ by 0.001 to 0.02."""
SLOW_SHARE: Final = 0.7
"""The share of a step's time from which on the run is reported to wait for that stage."""
RATE_WARNING: Final = "rate_warning"
"""The key of a run's ``config`` under which a learning rate far from the usual one is noted."""
_OF_SCORING: Final = frozenset(
    {"scorer_failed", "misplaced_reward", "judge_failed", "judge_contradiction"}
)
"""The findings that are about the scoring, not about the agent; a scorer's name may precede."""
_OTHER_FINDINGS: Final = frozenset({HELD_OUT.reason, "stale", "version_stale", "zero_variance"})


def unusual_rate(facts: Facts) -> Finding | None:
    noted = facts.run.config.get(RATE_WARNING) if facts.run is not None else None
    if not noted:
        return None
    return Finding(
        "unusual_learning_rate",
        Severity.WARNING,
        "The learning rate is far from the usual one for what is trained",
        f"{noted[0].upper()}{noted[1:]}.",
        "Leave `training.optimizer.learning_rate` at `auto`, or set one nearer to it.",
    )


def other_weights(facts: Facts) -> Finding | None:
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


def no_reward(facts: Facts) -> Finding | None:
    """Report missing rewards, but only if something was supposed to give them."""
    if not facts.scored:
        return None
    ended = sum(number for name, number in facts.outcomes.items() if name != "open")
    share = share_of(facts.without_reward.number, ended)
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


_COSTS: Final = {
    "warn": "counts as before",
    "zero": "has no reward above 0",
    "quarantine": "is not trained on and counts as failed",
}


def guarded(facts: Facts) -> Finding | None:
    """Report the findings that guards, verifiers or the operator recorded of sessions."""
    own = {key: one for key, one in facts.findings.items() if not _of_scoring(key[0])}
    if not own:
        return None
    each = [
        f"{name} in {_sessions(one.number)} (each {_COSTS[mode]})"
        for (name, mode), one in own.items()
    ]
    return Finding(
        "guard_findings",
        Severity.WARNING,
        "Agents did what their task does not mean them to do",
        f"{', '.join(each)}.",
        "Look at the turns that the finding names (`bridle show SESSION`, or the session's page). "
        "`agent.guards=zero` takes the reward of such sessions; `quarantine` also keeps them "
        "out of training; a sandbox without network or history makes them impossible.",
        _examples(own.values()),
    )


def scoring(facts: Facts) -> Finding | None:
    """Report scorers and judges that gave no rewards, and rewards without a place."""
    own = {name: one for (name, _), one in facts.findings.items() if _of_scoring(name)}
    if not own:
        return None
    return Finding(
        "scoring_failed",
        Severity.WARNING,
        "Scorers or judges gave no rewards, or rewards at places that are not there",
        "; ".join(f"{name} in {_sessions(one.number)}" for name, one in own.items()) + ".",
        "The finding's detail names the scorer or judge and the reason (`bridle show SESSION`). "
        "Such sessions keep their other rewards.",
        _examples(own.values()),
    )


def _of_scoring(name: str) -> bool:
    return name.rpartition(".")[2] in _OF_SCORING


def _sessions(number: int) -> str:
    return f"{number} session{'' if number == 1 else 's'}"


def _examples(counted: Iterable[Counted]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id for one in counted for id in one.examples))[:5]


def _groups(facts: Facts) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for session in facts.sessions:
        if session.group is not None and session.reward is not None:
            found.setdefault(session.group, []).append(session.reward)
    return found


def _rewarded(facts: Facts) -> int:
    return sum(session.reward is not None for session in facts.sessions)


def no_groups(facts: Facts) -> Finding | None:
    alone = [s for s in facts.sessions if s.reward is not None]
    members = _groups(facts)
    alone = [s for s in alone if s.group is None or len(members[s.group]) < 2]
    if len(facts.sessions) < 2 or share_of(len(alone), _rewarded(facts)) < MOST:
        return None
    return Finding(
        "no_groups",
        Severity.ERROR,
        "Sessions are compared with none of their task, so every advantage is zero",
        f"{len(alone)} of {_rewarded(facts)} rewarded sessions are in no group, or alone in one.",
        "Run each task several times in one group: `--group-size 8` of `bridle rollout`, "
        "`groups.size` of `bridle train`, or `group_id` when your own code creates sessions.",
        tuple(session.id for session in alone[:5]),
    )


def equal_rewards(facts: Facts) -> Finding | None:
    groups = [values for values in _groups(facts).values() if len(values) > 1]
    if not facts.sessions:
        return _no_spread(facts)
    equal = [values for values in groups if min(values) == max(values)]
    if share_of(len(equal), len(groups)) < MOST:
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


def _no_spread(facts: Facts) -> Finding | None:
    """Report groups without spread in a run that trained the sessions of other runs.

    The groups are those that the trainer counted.
    """
    equal, taken = summed(facts, "groups/zero_variance"), summed(facts, "groups/collected")
    if not taken or equal / taken < MOST:
        return None
    return Finding(
        "rewards_equal",
        Severity.ERROR if equal == taken else Severity.WARNING,
        "All sessions of a group have the same reward, so the advantage is zero",
        f"{equal:.0f} of {taken:.0f} groups that were trained have no spread.",
        "Look at the groups of the recorded run (`bridle doctor RUN`, or Groups in `bridle "
        "viewer`): sessions that are alone in their group, without a reward, or all alike.",
    )


def stale(facts: Facts) -> Finding | None:
    """Report stale tokens by the rules' account and by what the trainer masked and dropped."""
    stale = sum(
        tokens for (_, reason), tokens in facts.account.fates.items() if reason == "version_stale"
    )
    late = summed(facts, "tokens/masked/stale") + summed(facts, "tokens/dropped/stale")
    taken = summed(facts, "tokens/captured")
    dropped, collected = (
        summed(facts, "sessions/dropped/stale"),
        summed(facts, "sessions/collected"),
    )
    shares = (
        share_of(stale, facts.account.captured),
        late / taken if taken else 0.0,
        dropped / collected if collected else 0.0,
    )
    if max(shares) < SOME:
        return None
    evidence = []
    if stale:
        evidence.append(
            f"{stale} of {facts.account.captured} sampled tokens are of versions too old to train"
        )
    if late:
        evidence.append(f"the trainer left out {late:.0f} of {taken:.0f} tokens as stale")
    if dropped:
        of = f"{dropped:.0f} of {collected:.0f} collected sessions"
        evidence.append(f"{of} were dropped as stale")
    return Finding(
        "stale_tokens",
        Severity.ERROR if max(shares) >= MOST else Severity.WARNING,
        "Tokens were sampled from a policy version too old to train",
        "; ".join(evidence) + ".",
        "Raise `max_staleness` (training settings) with an importance correction in the loss, "
        "or sample fewer sessions ahead: a lower concurrency, or more engines. Recorded sessions "
        "train with `recordings.version`, the version that drew them.",
    )


def nothing_trained(facts: Facts) -> Finding | None:
    """Report excluded tokens.

    Held-out sessions are no loss, and stale tokens and equal rewards have findings of their own.
    """
    account = facts.account
    left_out = {
        fate.reason: tokens
        for fate, tokens in account.fates.items()
        if fate.fate in ("masked", "dropped") and fate.reason not in _OTHER_FINDINGS
    }
    lost = sum(left_out.values())
    total = lost + account.of("trained") + account.of("trainable")
    if not total or share_of(lost, total) < MOST:
        return None
    shown = dict(sorted(left_out.items(), key=lambda item: -item[1]))
    return Finding(
        "tokens_excluded",
        Severity.WARNING,
        "Most sampled tokens are left out of training",
        f"{lost} of {total} accounted tokens: {listed(shown)}.",
        "The rules are those of the run (`--rules`, docs/data.md), the filters those of its "
        "settings. A kind that was derived wrongly is set with `bridle kind`.",
    )


def growing_gap(facts: Facts) -> Finding | None:
    gaps = [m.value for m in facts.metrics.get("update/logprob_gap", ())]
    if len(gaps) < 6:
        return None
    third = len(gaps) // 3
    before, after = fmean(gaps[:third]), fmean(gaps[-third:])
    if after < max(2 * before, ROUNDING) or after > LARGEST_GAP:
        return None
    return Finding(
        "gap_grows",
        Severity.WARNING,
        "The gap between engine and trainer grows",
        f"{before:.3g} nats a token in the first third of the steps, {after:.3g} in the last.",
        "Serve in the trainer's precision, publish after every step, and use truncated importance "
        "weights. Sharper distributions widen the gap too: look at the entropy.",
    )


def slow(facts: Facts) -> Finding | None:
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
