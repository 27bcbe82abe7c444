"""The algorithms that are compared, as data: settings, source, assumption, and use of each.

A method changes one part of a configuration. ``bridle bench algorithms`` compares its gradient with
the exact one, and ``bridle bench learning`` the sessions that it needs.
"""

from __future__ import annotations

from typing import Any, Final

from bridle.recipes.learning.method import Changes, Method
from bridle.trainer.config import AdvantageConfig, GrpoConfig, LossConfig

PLAIN: Final = GrpoConfig(
    advantages=AdvantageConfig("leave_one_out"),
    loss=LossConfig(
        weighting="constant", constant_tokens=1, importance="none", trust_region="none"
    ),
)
"""The settings that ``bridle bench algorithms`` changes one at a time: REINFORCE with the mean of
the other sessions as its baseline, which has no bias on policy."""


def _credit(name: str, anchor: str = "state", **options: Any) -> Changes:
    stated = {"baseline": name, "anchor": anchor, "options": {name: options} if options else {}}
    return {"advantages": stated}


def _loss(**settings: Any) -> Changes:
    return {"loss": settings}


def _hint(**settings: Any) -> Changes:
    """Return a teacher that is the policy of the beginning and reads the task's hint."""
    return {"distillation": {"teacher": "ema", "decay": 1.0, "context": "hint", **settings}}


def _filter(*names: str) -> Changes:
    return {"filters": {"extra": names}}


METHODS: Final = (
    Method(
        "default",
        "Whole configurations",
        {},
        "GRPO, arXiv 2402.03300, with truncated importance weights and a trust region",
        "Groups of sessions of one task; rewards of whole sessions.",
        "Start here.",
        whole=True,
    ),
    Method(
        "no bias",
        "Whole configurations",
        _loss(importance="sequence", importance_cap=1e9),
        "leave-one-out baseline, a constant normaliser, the whole branch's importance weight",
        "A branch is a session; sessions are short, since the weight's variance grows with length.",
        "A reference for the others.",
    ),
    Method(
        "grpo",
        "Estimators",
        _credit("grpo"),
        "DeepSeekMath, arXiv 2402.03300",
        "The spread of a group's rewards is the scale on which its task should count.",
        "One reward a session, and tasks of different scales.",
    ),
    Method(
        "grpo, population",
        "Estimators",
        {"advantages": {"baseline": "grpo", "deviation": "population"}},
        "DeepSeekMath, arXiv 2402.03300, as other trainers compute it",
        "As grpo.",
        "Comparisons with trainers that divide by the deviation of the population.",
    ),
    Method(
        "leave_one_out",
        "Estimators",
        _credit("leave_one_out"),
        "RLOO, arXiv 2402.14740",
        "Rewards of all tasks have one scale.",
        "A gradient without bias.",
    ),
    Method(
        "mean",
        "Estimators",
        _credit("mean"),
        "Dr. GRPO, arXiv 2503.20783",
        "As leave_one_out; each advantage is (G - 1) / G of it.",
        "Groups of which some tasks are nearly always solved, or never.",
    ),
    Method(
        "lite_ppo",
        "Estimators",
        {"advantages": {"baseline": "lite_ppo"}, "loss": {"weighting": "token"}},
        "Lite PPO, arXiv 2508.08221: the group's mean, the deviation of the step, token weights",
        "A step has many groups, so that its deviation is a steady scale.",
        "Groups of which some have hardly any spread.",
    ),
    Method(
        "gated",
        "Estimators",
        _credit("gated"),
        "G-RA, arXiv 2508.10548",
        "Rewards of steps can be gamed where the session's own reward is missed.",
        "Rewards of steps that should count only in sessions that succeed.",
        steps=True,
    ),
    Method(
        "per_role",
        "Estimators",
        _credit("per_role"),
        "Dr. MAS, arXiv 2602.08847",
        "A role's steps are comparable with each other.",
        "Several roles, each with a reward or a scale of its own.",
    ),
    Method(
        "spiral",
        "Estimators",
        _credit("spiral"),
        "SPIRAL, arXiv 2506.24119",
        "The reward of a role drifts slowly, so that a running mean is its baseline.",
        "Games whose sessions have no group.",
    ),
    Method(
        "gigpo",
        "Estimators",
        _credit("gigpo", discount=0.95),
        "GiGPO, arXiv 2505.10978",
        "States recur among the sessions of a group; what follows depends on the state.",
        "Long sessions with one reward, in an environment whose states recur.",
    ),
    Method(
        "gigpo, prompt",
        "Estimators",
        _credit("gigpo", anchor="prompt", discount=0.95),
        "GiGPO, arXiv 2505.10978: equal prompts are the state",
        "Prompts recur, so they do not keep the history.",
        "Agents that see the state alone.",
    ),
    Method(
        "gigpo, last_observation",
        "Estimators",
        _credit("gigpo", anchor="last_observation", discount=0.95),
        "GiGPO with the last observation as the state",
        "The last observation says all about what follows.",
        "Prompts that keep the history.",
    ),
    Method(
        "gigpo, last_n",
        "Estimators",
        _credit("gigpo", anchor="last_n", discount=0.95),
        "GiGPO with the last two observations as the state",
        "Two observations say all about what follows.",
        "Observations that repeat though the state has changed.",
    ),
    Method(
        "gigpo, step_weight 4",
        "Estimators",
        _credit("gigpo", discount=0.95, step_weight=4.0),
        "GiGPO, arXiv 2505.10978, ω = 4",
        "As gigpo.",
        "Long sessions, in which the session's own advantage is mostly luck.",
    ),
    Method(
        "gigpo with step rewards",
        "Estimators",
        _credit("gigpo", discount=0.95),
        "GiGPO, arXiv 2505.10978, equation 6",
        "As gigpo.",
        "Long sessions with rewards of steps.",
        steps=True,
    ),
    Method(
        "turn_returns",
        "Estimators",
        _credit("turn_returns", discount=0.95),
        "discounted returns of turns, normalised over the group",
        "Steps of one group have comparable returns.",
        "Rewards that follow soon after the step that earned them.",
    ),
    Method(
        "turn_returns with step rewards",
        "Estimators",
        _credit("turn_returns", discount=0.95),
        "discounted returns of turns, normalised over the group",
        "As turn_returns.",
        "Rewards of steps.",
        steps=True,
    ),
    Method(
        "critic",
        "Estimators",
        _credit("critic"),
        "GAE over turns: ArCHer, arXiv 2402.19446; VL-DAC, 2508.04280; StepPO, 2604.18401",
        "The last observation says what can still be reached; values change slowly.",
        "Long sessions with one reward, or sessions without a group.",
    ),
    Method(
        "critic with step rewards",
        "Estimators",
        _credit("critic"),
        "GAE over turns: ArCHer, arXiv 2402.19446; VL-DAC, 2508.04280; StepPO, 2604.18401",
        "As critic.",
        "Long sessions with rewards of steps.",
        steps=True,
    ),
    Method(
        "aem",
        "Estimators",
        _credit("aem"),
        "AEM, arXiv 2605.00425",
        "A reply of which the policy was sure says more about its reward.",
        "Long sessions with one reward, whose entropy should fall late.",
    ),
    Method(
        "igpo",
        "Estimators",
        _credit("igpo"),
        "IGPO, arXiv 2510.14967",
        "Each task has one right answer, and a turn is good if it makes the answer likelier.",
        "Search and other tools that find out something, with one reward at the end.",
        not_compared="the enumerated tasks have no answer that could be scored",
    ),
    Method(
        "none",
        "Estimators",
        _credit("none"),
        "On-policy distillation, arXiv 2306.13649",
        "A teacher is served.",
        "A teacher's scores alone.",
        not_compared="its credit is 0 without a teacher",
    ),
    Method(
        "siblings",
        "Estimators",
        _credit("siblings"),
        "a group is the sessions that re-enter one session at one turn",
        "The turns before the branch are as good as the recorded ones.",
        "Long sessions whose reward depends on one late turn.",
        not_compared="the enumerated sessions re-enter none",
    ),
    Method(
        "turn_values",
        "Estimators",
        _credit("turn_values"),
        "VinePPO, arXiv 2410.01679: the value after a turn minus the value before it",
        "Several sessions re-enter each turn that counts.",
        "As siblings, where re-entries are cheap.",
        not_compared="the enumerated sessions re-enter none",
    ),
    Method(
        "clip",
        "Losses",
        _loss(name="clip"),
        "PPO, arXiv 1707.06347, with DAPO's clip-higher, arXiv 2503.14476",
        "Few updates a step.",
        "The default.",
    ),
    Method(
        "gspo",
        "Losses",
        _loss(name="gspo", clip_low=3e-4, clip_high=4e-4),
        "GSPO, arXiv 2507.18071",
        "A branch is the unit of a reward.",
        "Mixture-of-experts models, whose token ratios are noisy.",
    ),
    Method(
        "cispo",
        "Losses",
        _loss(name="cispo"),
        "MiniMax-M1, arXiv 2506.13585",
        "Rare tokens matter, so no token loses its gradient.",
        "Several updates a step.",
    ),
    Method(
        "aepo",
        "Losses",
        _loss(name="aepo"),
        "AEPO, arXiv 2510.14545, section 3.3",
        "Tokens of high entropy are where a session is decided.",
        "Several updates a step, and tools whose results leave the policy unsure.",
    ),
    Method(
        "epo",
        "Losses",
        _loss(name="epo"),
        "EPO, arXiv 2509.22576, with a corridor that has a gradient",
        "Entropy should stay near that of the policy that sampled.",
        "Long sessions with one reward, whose entropy swings.",
    ),
    Method(
        "importance truncate",
        "Importance weights",
        _loss(importance="truncate"),
        "Yao et al. 2025, truncated importance sampling",
        "Engine and trainer differ token by token.",
        "The default.",
    ),
    Method(
        "importance mask",
        "Importance weights",
        _loss(importance="mask"),
        "IcePop, arXiv 2510.18855",
        "A token far from the engine's distribution is an error of the engine.",
        "Mixture-of-experts models.",
    ),
    Method(
        "importance sequence",
        "Importance weights",
        _loss(importance="sequence"),
        "Liu et al. 2025, sequence-level truncated importance sampling",
        "Branches are short, since the weight is a product over their tokens.",
        "Short sessions that lag.",
    ),
    Method(
        "importance none",
        "Importance weights",
        _loss(importance="none"),
        "no correction",
        "Engine and trainer agree, and no session lags.",
        "The embedded engine.",
    ),
    Method(
        "trust clip",
        "Trust regions",
        _loss(trust_region="clip"),
        "PPO's clip from the behaviour policy; AReaL, arXiv 2505.24298",
        "A token that has moved far enough needs no further push.",
        "The default.",
    ),
    Method(
        "trust off_policy",
        "Trust regions",
        _loss(trust_region="off_policy"),
        "DeepSeek-V3.2, arXiv 2512.02556",
        "Bad branches that have become rare teach nothing.",
        "Sessions that lag by several versions.",
    ),
    Method(
        "trust none",
        "Trust regions",
        _loss(trust_region="none"),
        "no region",
        "No session lags.",
        "On-policy runs.",
    ),
    Method(
        "weighting session",
        "Weightings",
        _loss(weighting="session"),
        "GRPO, arXiv 2402.03300: a mean over sequences",
        "Every session should count alike.",
        "The default.",
    ),
    Method(
        "weighting token",
        "Weightings",
        _loss(weighting="token"),
        "DAPO, arXiv 2503.14476: a mean over tokens",
        "Every token should count alike.",
        "Long replies whose tokens should not count less.",
    ),
    Method(
        "weighting constant",
        "Weightings",
        _loss(weighting="constant"),
        "Dr. GRPO, arXiv 2503.20783",
        "Length is no aim in itself.",
        "A gradient without bias from length.",
    ),
    Method(
        "filter truncated",
        "Filters",
        _filter("truncated"),
        "DAPO's overlong filtering, arXiv 2503.14476",
        "A reply at the limit says nothing about its answer.",
        "A token limit that cuts sound replies.",
    ),
    Method(
        "filter over_turn",
        "Filters",
        _filter("over_turn"),
        "Mini-o3, arXiv 2509.07969",
        "A session that ran out of turns would have succeeded with more.",
        "Training with fewer turns than the policy has later.",
    ),
    Method(
        "filter void_turn",
        "Filters",
        _filter("void_turn"),
        "SimpleTIR, arXiv 2509.02479",
        "A turn without text and action shows that the policy has drifted.",
        "Multi-turn tool use that collapses.",
    ),
    Method(
        "filter failed_calls",
        "Filters",
        _filter("failed_calls"),
        "an error of the engine is not the agent's",
        "Failures are independent of what the policy does.",
        "Engines that fail now and then.",
    ),
    Method(
        "resample_on_correct",
        "Filters",
        {"filters": {"resample_on_correct": True}},
        "GRPO-RoC, rStar2-Agent, arXiv 2508.20722",
        "Groups are twice as large as wanted.",
        "Successes with faulty tool calls.",
    ),
    Method(
        "overlong",
        "Filters",
        {"advantages": {"overlong_tokens": 5, "overlong_margin": 4}},
        "DAPO's soft overlong punishment, arXiv 2503.14476",
        "Short sessions are worth something in themselves: the aim is another one.",
        "A limit of tokens that sessions come near to.",
    ),
    Method(
        "zero_variance kept",
        "Filters",
        {"filters": {"drop_zero_variance": False}},
        "DAPO's dynamic sampling, arXiv 2503.14476, turned off",
        "Groups with equal rewards count as sessions without a gradient.",
        "A gradient whose length shows how much there is to learn.",
    ),
    Method(
        "summaries trained",
        "Samples",
        {"samples": {"kinds": ("main", "subagent", "unknown", "compaction")}},
        "SUPO, arXiv 2510.06727",
        "What a summary leaves out decides what follows.",
        "Agents that compact their history.",
        not_compared="the enumerated sessions have no summaries",
    ),
    Method(
        "kl",
        "Penalties",
        _loss(kl_coefficient=0.05),
        "GRPO, arXiv 2402.03300; corrected, DeepSeek-V3.2, arXiv 2512.02556",
        "A reference policy is worth staying near to.",
        "Long runs on narrow tasks.",
        not_compared="it adds another aim, the distance from a reference policy",
    ),
    Method(
        "distillation",
        "Penalties",
        {},
        "On-policy distillation, arXiv 2306.13649",
        "A better model with the same tokenizer.",
        "A small policy beside a large one.",
        not_compared="it adds another aim, the distance from a teacher",
    ),
    Method(
        "teacher with a hint",
        "Penalties",
        _hint(coefficient=0.2, clip=2.0),
        "Skill-SD, arXiv 2604.10674; Self-Distillation, arXiv 2601.19897",
        "The policy can use what the hint says.",
        "Tasks whose answers are known, and that the policy solves when it reads them.",
        not_compared="it adds another aim, the distance from a teacher",
    ),
    Method(
        "teacher with a hint, coefficient 1",
        "Penalties",
        _hint(),
        "as teacher with a hint",
        "The teacher is right about everything that the policy should do.",
        "A teacher that solves the tasks every time.",
        not_compared="it adds another aim, the distance from a teacher",
    ),
    Method(
        "teacher with a hint, alone",
        "Penalties",
        {**_hint(), "advantages": {"baseline": "none"}},
        "as teacher with a hint, without rewards",
        "As with a coefficient of 1.",
        "Tasks without a verifier.",
        not_compared="it adds another aim, the distance from a teacher",
    ),
)
"""All methods, in the order of the published page."""


def method(name: str) -> Method:
    """Return the method of a name. Raise ``KeyError`` if there is none."""
    return {one.name: one for one in METHODS}[name]
