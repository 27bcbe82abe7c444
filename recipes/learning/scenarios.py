"""The conditions under which methods learn, and the expectation from each method's paper, as data.

Every scenario is a :class:`.world.World` in which some methods should differ from the default. An
expectation was written before its run. It is reported as met or missed, and never adjusted.

The scenarios have one learning rate, at which the default learns without forgetting. Where a method
gains speed alone, and the default is limited by the rate and not by noise, the gain does not show.
In "roles, own rates" each method has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bridle.recipes.learning.world import World

RATE: Final = 0.2
DEFAULT: Final = "default"

SCENARIOS: Final = (
    World("plain", "A corridor of four places; each step is a call of its own.", rate=RATE),
    World(
        "history",
        "Prompts keep the history, so no two of a group are equal after the first difference.",
        places=6,
        ways=6,
        steps=8,
        history=True,
        group_size=16,
        rate=RATE,
    ),
    World(
        "long",
        "Thirty steps with one reward at their end.",
        places=10,
        ways=8,
        steps=30,
        history=True,
        rate=RATE,
    ),
    World(
        "long, step rewards",
        "Thirty steps; each that leads on has a reward.",
        places=10,
        ways=8,
        steps=30,
        history=True,
        step_rewards=True,
        rate=RATE,
    ),
    World(
        "roles",
        "A planner and a worker answer one question each, with a reward of its own.",
        places=8,
        ways=8,
        steps=2,
        quiz=True,
        roles=True,
        history=True,
        rate=RATE,
    ),
    World(
        "roles, own rates",
        "The roles again; each method learns at the best of four rates, chosen on five more seeds.",
        places=8,
        ways=8,
        steps=2,
        quiz=True,
        roles=True,
        history=True,
        rates=(0.3, 0.45, 0.7, 1.0),
    ),
    World(
        "wordy",
        "The agent writes six words after a wrong way, so that failures are long.",
        history=True,
        wordy=6,
        failing=0.1,
        rate=RATE,
    ),
    World(
        "summary",
        "The agent sums up its history once; after a wrong summary it starts over.",
        history=True,
        summary_at=3,
        rate=RATE,
    ),
    World(
        "hints",
        "Thirty steps with one reward. A policy that reads a hint is right four times in five.",
        places=10,
        ways=8,
        steps=30,
        history=True,
        hint=0.8,
        rate=RATE,
    ),
    World("lag", "The sampler is four versions older.", history=True, lag=4, rate=RATE),
    World("noise", "The engine samples from other logits.", history=True, noise=0.5, rate=RATE),
    World(
        "updates",
        "Eight updates a step: four passes over two minibatches.",
        history=True,
        minibatches=2,
        epochs=4,
        rate=RATE,
    ),
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """A claim about the sessions that a method needs, as a share of another's."""

    method: str
    scenario: str
    claim: str
    at_most: float | None = None
    at_least: float | None = None
    against: str = DEFAULT

    def met(self, ratio: float | None) -> bool:
        """Return whether a ratio meets the claim; ``None`` is a method that never arrives."""
        if ratio is None:
            return self.at_most is None
        return (self.at_most is None or ratio <= self.at_most) and (
            self.at_least is None or ratio >= self.at_least
        )

    @property
    def bound(self) -> str:
        parts = [
            f"{sign} {value:g}"
            for sign, value in (("≤", self.at_most), ("≥", self.at_least))
            if value is not None
        ]
        return " and ".join(parts)


EXPECTATIONS: Final = (
    Expectation("leave_one_out", "plain", "RLOO: as good as GRPO", at_most=1.1, at_least=0.9),
    Expectation("mean", "plain", "Dr. GRPO: as good as GRPO", at_most=1.1, at_least=0.9),
    Expectation("lite_ppo", "plain", "Lite PPO: no slower than GRPO", at_most=1.0),
    Expectation(
        "gigpo", "history", "GiGPO: states that recur give credit to single steps", at_most=0.75
    ),
    Expectation(
        "gigpo, prompt",
        "history",
        "prompts that keep the history do not recur: no better than by states",
        at_least=1.0,
        against="gigpo",
    ),
    Expectation("aem", "long", "AEM: no slower than GRPO", at_most=1.0),
    Expectation("critic", "long", "ArCHer, VL-DAC: values of turns pay in long ones", at_most=0.5),
    Expectation(
        "turn_returns with step rewards",
        "long, step rewards",
        "MT-GRPO, arXiv 2505.11821: rewards of turns beat one of the session",
        at_most=0.5,
    ),
    Expectation(
        "critic with step rewards",
        "long, step rewards",
        "VL-DAC: values of turns, with their rewards",
        at_most=0.5,
    ),
    Expectation(
        "gigpo with step rewards",
        "long, step rewards",
        "GiGPO, equation 6: rewards of steps count in the return of each",
        at_most=0.5,
    ),
    Expectation("gated", "long, step rewards", "G-RA: no slower than without them", at_most=1.0),
    Expectation("per_role", "roles", "Dr. MAS: a role is compared with itself", at_most=0.7),
    Expectation("spiral", "roles", "SPIRAL: a role has a baseline of its own", at_most=0.7),
    Expectation(
        "per_role", "roles, own rates", "Dr. MAS: a role is compared with itself", at_most=0.7
    ),
    Expectation(
        "spiral", "roles, own rates", "SPIRAL: a role has a baseline of its own", at_most=0.7
    ),
    Expectation("weighting token", "wordy", "DAPO: a mean over tokens", at_most=1.0),
    Expectation("weighting constant", "wordy", "Dr. GRPO: no bias from length", at_most=1.0),
    Expectation("filter truncated", "wordy", "DAPO: overlong filtering", at_most=1.0),
    Expectation("filter over_turn", "wordy", "Mini-o3: over-turn masking", at_most=1.0),
    Expectation("filter void_turn", "wordy", "SimpleTIR: void turns left out", at_most=1.0),
    Expectation("overlong", "wordy", "DAPO: soft overlong punishment", at_most=1.0),
    Expectation(
        "resample_on_correct", "wordy", "GRPO-RoC: half of the sessions for the same", at_most=2.0
    ),
    Expectation("summaries trained", "summary", "SUPO: summaries are learned too", at_most=0.75),
    Expectation(
        "teacher with a hint",
        "hints",
        "Skill-SD: a teacher that knows more teaches in half of the sessions",
        at_most=0.5,
    ),
    Expectation("trust none", "lag", "AReaL: a region around the sampler helps", at_least=1.0),
    Expectation(
        "trust off_policy",
        "lag",
        "DeepSeek-V3.2: no slower than without a region",
        at_most=1.0,
        against="trust none",
    ),
    Expectation("importance sequence", "lag", "sequence-level weights: no slower", at_most=1.0),
    Expectation("importance none", "noise", "truncated weights help", at_least=1.0),
    Expectation("importance mask", "noise", "IcePop: no slower than truncation", at_most=1.0),
    Expectation("gspo", "updates", "GSPO: more efficient than GRPO", at_most=1.0),
    Expectation("aepo", "updates", "AEPO: no slower than GRPO", at_most=1.0),
    Expectation("epo", "updates", "EPO: no slower than GRPO", at_most=1.0),
    Expectation("cispo", "updates", "MiniMax-M1: half of the steps", at_most=0.5),
)

ALSO: Final = {
    "grpo, population": ("plain",),
    "teacher with a hint, coefficient 1": ("hints",),
    "teacher with a hint, alone": ("hints",),
    "gigpo": ("long",),
    "gigpo, last_observation": ("history",),
    "gigpo, last_n": ("history",),
    "gigpo, step_weight 4": ("history",),
    "turn_returns": ("long",),
    "filter failed_calls": ("wordy",),
    "zero_variance kept": ("plain",),
    "critic": ("history",),
    "per_role": ("history",),
    "importance mask": ("lag",),
    "importance none": ("lag",),
    "trust none": ("updates",),
}
"""Further scenarios in which a method runs, without an expectation."""


def scenario(name: str) -> World:
    """Return the scenario of a name. Raise ``KeyError`` if there is none."""
    return {one.name: one for one in SCENARIOS}[name]


def methods_of(name: str) -> list[str]:
    """Return the methods that run in a scenario, the default first."""
    expected = [one for one in EXPECTATIONS if one.scenario == name]
    named = [method for one in expected for method in (one.against, one.method)]
    also = [method for method, names in ALSO.items() if name in names]
    return list(dict.fromkeys([DEFAULT, *named, *also]))
