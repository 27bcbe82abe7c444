"""The numbers of a training step: each name with its unit, its meaning and its place on a page.

The trainer computes them (:mod:`bridle.trainer.report`, :mod:`bridle.trainer.batch.figures`) and
writes them into the table ``metrics`` and to trackers. The pages of a run and the documentation
read their meaning from here. A ``*`` in a name stands for a part that is known at run time, such as
a task or a lag; each ends its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One number of a step, or all whose name begins alike."""

    name: str
    unit: str
    meaning: str
    chart: str = ""
    """The title of the chart that shows it; those with one title share it. Empty if none does."""

    @property
    def prefix(self) -> str | None:
        """The beginning of the names, or ``None`` for a single number."""
        return self.name[:-1] if self.name.endswith("*") else None


@dataclass(frozen=True, slots=True)
class Section:
    """Diagnostics that belong together, with their heading."""

    title: str
    diagnostics: tuple[Diagnostic, ...]


def _d(name: str, unit: str, meaning: str, chart: str = "") -> Diagnostic:
    return Diagnostic(name, unit, meaning, chart)


SECTIONS: Final = (
    Section(
        "Reward",
        (
            _d("reward/mean", "reward", "mean of what sessions are compared by", "Reward, mean"),
            _d("reward/std", "reward", "standard deviation of the sessions", "Reward, deviation"),
            _d("reward/min", "reward", "the lowest of a session"),
            _d("reward/max", "reward", "the highest of a session"),
            _d("reward/whole", "reward", "mean of sessions from their start, if others re-enter"),
            _d("reward/task/*", "reward", "mean of a task, in steps of 16 tasks or fewer"),
            _d(
                "reward/role/*",
                "reward",
                "mean of a role: its own rewards, or its sessions'",
                "Reward by role",
            ),
            _d(
                "reward/name/*",
                "reward",
                "mean of the sessions' rewards of a name, of 16 names at most",
                "Reward by name",
            ),
            _d(
                "reward/turns/*",
                "reward",
                "mean of the sessions with so many calls",
                "Reward by calls",
            ),
            _d("pass/at_*", "share", "chance that one of k sessions gets 1 or more", "Pass at k"),
            _d("groups/collected", "groups", "groups with a reward"),
            _d(
                "groups/zero_variance",
                "groups",
                "groups that teach nothing, as their rewards are equal",
                "Groups with equal rewards",
            ),
            _d("signal/group_std", "reward", "mean standard deviation in a group"),
            _d("signal/top_group", "share", "share of the variance that the widest group has"),
            _d("signal/length_reward", "correlation", "of sampled tokens and reward in a group"),
            _d("judge/score", "reward", "mean score of a rubric's judges"),
            _d("judge/spread", "reward", "disagreement of the judges"),
            _d("judge/verifier", "reward", "the verifier's mean in the sessions that judges score"),
            _d("rewards/unplaced", "rewards", "rewards of turns that their sessions do not have"),
        ),
    ),
    Section(
        "Sessions",
        (
            _d("sessions/collected", "sessions", "sessions that the step collected"),
            _d("sessions/trained", "sessions", "sessions of which something is trained"),
            _d("sessions/punished_for_length", "sessions", "sessions punished by overlong_tokens"),
            _d("sessions/dropped/*", "sessions", "sessions left out, by reason"),
            _d("signal/calls", "calls", "mean number of a session", "Calls of a session"),
            _d("signal/reply_tokens", "tokens", "mean length of a reply"),
            _d("length/solved", "tokens", "of a reply in sessions with 1 or more", "Reply length"),
            _d("length/failed", "tokens", "of a reply in the other sessions", "Reply length"),
            _d("length/cut", "share", "replies that ended at the token limit", "Replies cut"),
            _d(
                "tools/failed",
                "share",
                "replies with a tool call that cannot be read, of those with any",
                "Tool calls that failed",
            ),
            _d("signal/repeats", "share", "sampled tokens that repeat 16 of their session"),
            _d(
                "slots/useful",
                "share",
                "session time whose sampled tokens are trained",
                "Useful slot time",
            ),
        ),
    ),
    Section(
        "Tokens",
        (
            _d("tokens/captured", "tokens", "sampled tokens of the step's sessions"),
            _d("tokens/trained", "tokens", "those that are trained", "Tokens trained"),
            _d("tokens/masked", "tokens", "those that are context alone"),
            _d("tokens/masked/*", "tokens", "the same, by reason"),
            _d("tokens/dropped", "tokens", "those of no sample"),
            _d("tokens/dropped/*", "tokens", "the same, by reason"),
            _d("staleness/mean", "versions", "mean lag of the trained tokens", "Staleness"),
            _d("staleness/max", "versions", "the largest lag"),
            _d("packing/computed_tokens", "tokens", "tokens of one pass"),
            _d("packing/unshared_tokens", "tokens", "the same without shared prefixes"),
            _d("packing/packs", "packs", "forward passes of one pass"),
            _d("replay/sessions", "sessions", "replayed successes"),
            _d("replay/tokens", "tokens", "their trained tokens"),
            _d("replay/buffer", "sessions", "successes that are kept"),
            _d("replay/staleness", "versions", "mean lag of the replayed tokens"),
            _d("recordings/sessions", "sessions", "recorded sessions beside the step's own"),
            _d("recordings/tokens", "tokens", "their trained tokens"),
            _d("recordings/candidates", "sessions", "those that they were drawn from"),
            _d("recordings/advantage", "advantage", "their mean advantage"),
        ),
    ),
    Section(
        "Update",
        (
            _d("policy/version", "version", "the policy's version after the step"),
            _d("policy/learning_rate", "rate", "the step's learning rate", "Learning rate"),
            _d("update/loss", "loss", "mean of the updates"),
            _d("update/entropy", "nats", "mean of the trained tokens", "Entropy"),
            _d("update/entropy_bonus", "coefficient", "of the bonus below entropy_floor"),
            _d("update/grad_norm", "norm", "mean of the updates, before clipping", "Gradient norm"),
            _d("update/skipped", "updates", "updates not taken: the gradient was not finite"),
            _d("gradient/*", "norm", "the same of a kind of layer", "Gradient norm by layers"),
            _d("advantage/min", "advantage", "the least of a trained token"),
            *(
                _d(f"advantage/p{q}", "advantage", f"{q}% have no more", "Advantage, quantiles")
                for q in ("05", "50", "95")
            ),
            _d("advantage/max", "advantage", "the largest of a trained token"),
            _d("advantage/positive", "share", "trained tokens with an advantage above 0"),
            _d(
                "update/clip_fraction",
                "share",
                "tokens whose gradient the clip bounds, in steps of several updates",
                "Clipped",
            ),
            _d("update/ratio", "ratio", "mean of π / π_old, in steps of several updates"),
            _d("update/*", "", "what a loss adds, by its own name"),
            _d("distillation/tokens", "tokens", "tokens that a teacher scored"),
            _d("distillation/gap", "nats", "mean by which the teacher's logprob is larger"),
            _d("distillation/clip_fraction", "share", "tokens at the bound of that"),
            _d("distillation/without_context", "sessions", "sessions that have no context"),
        ),
    ),
    Section(
        "Distance",
        (
            _d("importance/mean", "ratio", "mean importance weight as used"),
            _d("importance/min", "ratio", "the least π / μ of a token", "Ratio, quantiles"),
            *(
                _d(f"importance/p{q}", "ratio", f"{int(q)}% have no more", "Ratio, quantiles")
                for q in ("01", "50", "99")
            ),
            _d(
                "importance/effective",
                "share",
                "effective sample size, as a share of the tokens",
                "Effective sample size",
            ),
            _d("importance/outside", "share", "outside the trust region", "Outside the region"),
            _d("kl/sampler", "nats", "KL(μ ‖ π) of all tokens", "KL from the sampler"),
            _d("kl/sampler/lag_*", "nats", "that of tokens of a lag", "KL from the sampler by lag"),
            _d("kl/engine", "nats", "that of tokens without lag: engine and trainer", "KL, engine"),
            _d(
                "kl/step", "nats", "KL(old ‖ new) of the step's updates, on a probe", "KL of a step"
            ),
            _d("kl/start", "nats", "KL(start ‖ new) on tokens of the start", "KL from the start"),
            _d("update/kl_old", "nats", "KL(π_old ‖ π) within a step of several updates"),
            _d("update/kl_reference", "nats", "KL from the reference of kl_coefficient"),
            _d("update/logprob_gap", "nats", "mean |engine − trainer|", "Engine–trainer gap"),
            _d("update/logprob_gap_max", "nats", "the largest |engine − trainer|"),
        ),
    ),
    Section(
        "Time",
        (
            _d("seconds/collect", "s", "waiting for sessions"),
            _d("seconds/prepare", "s", "rewards, advantages and filters"),
            _d("seconds/score", "s", "logprobs of the old and the reference policy"),
            _d("seconds/update", "s", "forward and backward passes, and optimizer steps"),
            _d("seconds/probe", "s", "scores of the probes of kl/step and kl/start"),
            _d("seconds/publish", "s", "training stalled by publishing", "Stalled by publishing"),
        ),
    ),
    Section("Held out", (_d("evaluation/*", "", "an evaluation, with the ends of its interval"),)),
)
"""All numbers of a step, in the order of pages."""

DIAGNOSTICS: Final = tuple(one for section in SECTIONS for one in section.diagnostics)


def declared(name: str) -> Diagnostic | None:
    """Return the declaration of a number, or ``None``; a full name precedes a beginning.

    The numbers of a further policy have its name before theirs.
    """
    exact = {one.name: one for one in DIAGNOSTICS}
    if name in exact:
        return exact[name]
    longest = max(
        (one for one in DIAGNOSTICS if one.prefix is not None and name.startswith(one.prefix)),
        key=lambda one: len(one.name),
        default=None,
    )
    return longest


def table() -> str:
    """Return the numbers as Markdown, a table for each section."""
    parts = []
    for section in SECTIONS:
        rows = [f"| `{one.name}` | {one.unit} | {one.meaning} |" for one in section.diagnostics]
        head = f"**{section.title}**\n\n| number | unit | meaning |\n| --- | --- | --- |"
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)
