"""``igpo``: information gain of turns (IGPO, arXiv 2510.14967).

``a`` is the right answer of ``L`` tokens, ``o_t`` what follows turn ``t``, and the policy's
probability of the answer is ``p_t = exp(1/L Σ_j log π(a_j | q, o_<=t, a_<j))``. A turn before the
last has the reward ``r_t = p_t - p_{t-1}``, and the last one the session's number:

    ``A_t = norm(r)_t``, over all turns of the group    ``Â_t = Σ_{k >= t} γ^(k - t) A_k``

The answer is a field of the task's payload. A turn of a session without it has the gain 0. The
answer is scored right after the prompt of the next turn; the paper puts a tag of its own before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from bridle.trainer.config import Share
from bridle.trainer.credit.group import Credit, CreditGroup, normalized, register_advantage, scoring


@dataclass(frozen=True, slots=True)
class IgpoOptions:
    field: str = "answer"
    """The field of the task's payload that has the right answer."""
    discount: Share = 1.0
    """The discount γ of the advantages of later turns."""


_IGPO: Final = IgpoOptions()


@register_advantage("igpo")
@scoring
def igpo(group: CreditGroup, options: IgpoOptions = _IGPO) -> Credit:
    """Compare what each turn adds to the policy's probability of the right answer."""
    place = {(step.episode, step.call_id): at for at, step in enumerate(group.steps)}
    rewards = np.zeros(len(place))
    orders = []
    for number, episode in enumerate(group.episodes):
        steps = group.steps_of(number)
        order = [place[number, step.call_id] for step in steps]
        orders.append(order)
        answer = episode.payload.get(options.field)
        if answer is not None and len(steps) > 1:
            asked = [(step.prompt, str(answer)) for step in steps]
            likely = [float(np.exp(np.mean(one))) for one in group.score(asked)]
            rewards[order[:-1]] = [after - before for before, after in pairwise(likely)]
        rewards[order[-1:]] = group.rewards[number]
    found = normalized(group, rewards, [None] * len(rewards))
    for order in orders:
        for at, after in reversed(list(pairwise(order))):
            found[at] += options.discount * found[after]
    return group.by_step(found)
