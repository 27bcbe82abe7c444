"""A method of the comparisons: its changes of a configuration, and what is published of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridle.store.reward import RewardSource
from bridle.trainer.config import GrpoConfig

Changes = Mapping[str, Any]
"""New values of a configuration's fields; a mapping changes the fields of a section."""


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the comparisons."""

    name: str
    part: str
    """The part that it changes: a heading of the published page."""
    changes: Changes
    source: str
    assumes: str
    use: str
    steps: bool = False
    """True if rewards of steps count too. The exact gradient is then that of their sum with the
    session's reward."""
    not_compared: str = ""
    """The reason why its gradient is not compared with the exact one; empty if it is."""
    whole: bool = False
    """True if ``changes`` are those of Bridle's default configuration and not of
    :data:`bridle.recipes.learning.methods.PLAIN`."""

    def configured(self, base: GrpoConfig) -> GrpoConfig:
        """Return ``base`` with this method's changes."""
        found = changed(base, self.changes)
        if not self.steps:
            return found
        sources = (RewardSource.VERIFIER, RewardSource.SCORER)
        return changed(found, {"advantages": {"reward_sources": sources}})


def changed(base: GrpoConfig, changes: Changes) -> GrpoConfig:
    """Return ``base`` with new values of some fields."""
    values = {
        name: replace(getattr(base, name), **value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return replace(base, **values)
