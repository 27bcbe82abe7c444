"""Anchors: the states by which steps of a group are compared with each other.

An anchor is a function from a group and one of its steps to a key. Steps with equal keys are at the
same state. A step whose key is ``None`` is at a state of its own.

====================  ==============================================================================
``prompt``            the whole prompt
``last_observation``  the role, and the messages that came after the last reply: an output of a
                      tool, or what the user wrote
``last_n``            the role, and the last ``n`` such observations of the role's steps
``state``             ``prompt`` if no prompt of the group's sessions holds an earlier one of its
                      session, else ``last_observation``: no two prompts of an agent that keeps its
                      history are equal after their first different reply
====================  ==============================================================================

An observation is the text of the recorded messages. For a session without its messages, it is the
tokens since the last sampled one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from bridle.registry import Registry
from bridle.trainer.config import Count
from bridle.trainer.credit.group import CreditGroup, CreditStep

Anchor = Callable[[CreditGroup, CreditStep], Hashable]
ANCHORS: Final[Registry[Anchor]] = Registry("anchor", "bridle.anchors")


@ANCHORS.registered("prompt")
def prompt(_group: CreditGroup, step: CreditStep) -> Hashable:
    """Return the ids of the prompt."""
    return step.prompt


@ANCHORS.registered("last_observation")
def last_observation(_group: CreditGroup, step: CreditStep) -> Hashable:
    """Return the role and what the agent saw last."""
    return step.role, step.observation


@dataclass(frozen=True, slots=True)
class LastOptions:
    n: Count = 2
    """Number of observations, the newest ones."""


_LAST: Final = LastOptions()


@ANCHORS.registered("last_n")
def last_n(group: CreditGroup, step: CreditStep, options: LastOptions = _LAST) -> Hashable:
    """Return the role and its last observations."""
    own = [one for one in group.steps_of(step.episode) if one.role == step.role]
    place = own.index(step) + 1
    return step.role, tuple(one.observation for one in own[max(0, place - options.n) : place])


@ANCHORS.registered("state")
def state(group: CreditGroup, step: CreditStep) -> Hashable:
    """Return the prompt, or the last observation where prompts keep the history."""
    return last_observation(group, step) if group.keeps_history else prompt(group, step)


def anchors(group: CreditGroup) -> list[Hashable]:
    """Return the key of each of the group's steps; steps at states of their own have new keys."""
    anchor = ANCHORS.configured(group.config.anchor, group.config.options)
    found = [anchor(group, step) for step in group.steps]
    return [object() if key is None else key for key in found]
