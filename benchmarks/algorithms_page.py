"""The page that ``bridle bench algorithms --markdown`` writes: every method beside the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridle.recipes.learning.gradients import POINTS, Compared, GradientFigures, GradientSettings
from bridle.recipes.learning.region import RegionFigures, bench_region
from bridle.recipes.learning.tree import TREE, enumerated


def page(found: Sequence[Compared], settings: GradientSettings) -> str:
    sessions = len(enumerated().starts)
    lines = [
        "# Algorithms beside the exact gradient",
        "",
        "Written by `bridle bench algorithms --markdown docs/algorithms.md`. A task of at most",
        f"{TREE.steps} steps with {TREE.ways} ways each is so small that all {sessions} sessions",
        "are enumerated, which gives the exact gradient of the expected reward in float64.",
        f"One store of {settings.sessions:,} recorded sessions gives the gradient of each method,",
        f"{settings.groups} groups of {settings.group_size} sessions at a time.",
        "",
        "Each row changes one part of a plain configuration: `leave_one_out`, `clip`, the",
        "weighting `constant`, no importance weights, no trust region. The figures are the cosine",
        "of the mean gradient with the exact one; its bias with the standard error, as shares of",
        "the exact gradient's length; and the variance of one batch, as a share of the squared",
        "length of the method's own mean. A method that divides by a standard deviation has",
        "another length, which counts as bias, and which AdamW does not see: then look at cosine",
        "and variance.",
        "",
        "- *sampler*: the policy is the one that sampled, and it is the first update of a step.",
        "- *lag*: the policy is three updates ahead of the sampler, straight along the gradient",
        "  and further than a trust region allows.",
        "- *update*: the third update of a step; the policy is two updates ahead.",
        "",
        *_region(bench_region(settings.seed)),
    ]
    for part in dict.fromkeys(one.method.part for one in found):
        own = [one for one in found if one.method.part == part]
        lines += ["", f"## {part}", "", *_table(own), "", *map(_text, own)]
    return "\n".join([*lines, ""])


def _region(found: Sequence[RegionFigures]) -> Iterator[str]:
    yield from (
        "## Why the default points away at lag",
        "",
        "The region of PPO's form leaves out a token that is likelier than when it was sampled,",
        "if its advantage is positive. The advantage of a session is that of a choice plus the",
        "luck of all other choices. So of a good choice that has risen, the lucky sessions are",
        "left out and the unlucky ones stay, and what stays pushes it down. This is a property of",
        "the method and no error of a sign or a weight: the table below has no sampling, and",
        "every session counts with its probability. With the advantage of the choice itself,",
        "which has the same mean without the luck, nothing points away: what is left is still",
        "ahead, or nothing is left (0). Only tokens outside the region are concerned.",
        "",
        "The pull back to the sampler costs speed ([Lag](learning.md#lag)), and keeps lagging runs",
        "from collapsing: a mask of both sides, which has no such pull, does not",
        "([training](training.md)).",
        "",
        "| ahead of the sampler, nats of a logit | outside | cosine: no region "
        "| clip, session's advantage | clip, choice's advantage |",
        "| ---: | ---: | ---: | ---: | ---: |",
    )
    for one in found:
        cosines = (one.without, one.by_session, one.by_choice)
        cells = " | ".join(f"{value:.3f}" for value in cosines)
        yield f"| {one.distance:g} | {one.outside:.0%} | {cells} |"


def _table(found: Sequence[Compared]) -> Iterator[str]:
    heads = " | ".join(f"{point}: cosine | bias | variance" for point in POINTS)
    yield f"| method | {heads} |"
    yield f"| --- |{' ---: |' * (3 * len(POINTS))}"
    for one in found:
        if one.figures:
            yield f"| {one.method.name} | {' | '.join(map(_cells, one.figures.values()))} |"
        else:
            yield f"| {one.method.name} | not compared: {one.method.not_compared} |"


def _cells(figures: GradientFigures) -> str:
    bias = f"{figures.bias:.2f} ± {figures.bias_error:.2f}"
    return f"{figures.cosine:.3f} | {bias} | {figures.variance:.2f}"


def _text(one: Compared) -> str:
    method = one.method
    return f"- **{method.name}**: {method.source}. Assumes: {method.assumes} Use: {method.use}"
