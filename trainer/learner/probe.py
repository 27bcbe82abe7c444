"""The KL of a policy from itself before, on a few of the tokens that were sampled from it.

A step's probe is some of the branches that it trains, scored before and after its updates:
``kl/step`` is KL(old ‖ new). The first step's probe is kept, with the scores that it had then:
``kl/start`` is KL(start ‖ new). Both are Schulman's k3 ("Approximating KL divergence", 2020), whose
tokens have to come from the policy that is compared with. A token that lags behind, or that was
drawn at another temperature, therefore makes ``kl/step`` an approximation.

A probe has at most :data:`SHARE` of the step's tokens, taken from its shortest branches, and the
shortest if it is short. So the four forward passes over it cost about one percent of the update of
a large step, and several of that of a small one (``seconds/probe``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bridle.trainer.batch.prepare import TrainItem
from bridle.trainer.policy.weights import Scores, Weights

SHARE: Final = 0.01
_SHORT: Final = 1024
"""Number of tokens up to which the shortest branch is a probe, whatever its share."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Some branches, their trained tokens, and a policy's scores of these."""

    ids: tuple[NDArray[np.int64], ...] = ()
    """The tokens of each branch."""
    masks: tuple[NDArray[np.bool_], ...] = ()
    """True where a token is compared; the first token of a branch has no score."""
    scores: tuple[NDArray[np.float32], ...] = ()
    """The logprobs of each branch's tokens but the first."""

    @classmethod
    def of(cls, items: Sequence[TrainItem]) -> Probe:
        """Choose a probe from what a step trains. It has no scores yet."""
        budget = SHARE * sum(len(item.sample.token_ids) for item in items)
        chosen: list[TrainItem] = []
        for item in sorted(items, key=lambda one: len(one.sample.token_ids)):
            size = len(item.sample.token_ids)
            if size > budget and (chosen or size > max(_SHORT, 2 * budget)):
                break
            chosen.append(item)
            budget -= size
        return cls(
            tuple(one.sample.token_ids.astype(np.int64) for one in chosen),
            tuple(one.sample.mask[1:] for one in chosen),
        )

    def scored(self, policy: Weights) -> Probe:
        """Return the probe with the scores of ``policy`` as it is now."""
        return Probe(self.ids, self.masks, tuple(policy.scores(self.ids)) if self.ids else ())

    def divergence(self, scores: Scores | Sequence[NDArray[np.float32]]) -> float | None:
        """Return KL(own ‖ other) in nats a token, of the other policy's ``scores``.

        Return ``None`` without a token that is compared.
        """
        differences = [
            (other - own)[mask].astype(np.float64)
            for own, other, mask in zip(self.scores, scores, self.masks, strict=True)
        ]
        whole = np.concatenate([np.zeros(0), *differences])
        return float((np.expm1(whole) - whole).mean()) if len(whole) else None

    def as_data(self) -> dict[str, Any]:
        """Return the probe as a checkpoint keeps it."""
        return {
            "ids": [each.tolist() for each in self.ids],
            "masks": [each.tolist() for each in self.masks],
            "scores": [each.tolist() for each in self.scores],
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Probe:
        """Return the probe that :meth:`as_data` returned, or one without branches for no data."""
        return cls(
            tuple(np.asarray(each, np.int64) for each in data.get("ids", ())),
            tuple(np.asarray(each, np.bool_) for each in data.get("masks", ())),
            tuple(np.asarray(each, np.float32) for each in data.get("scores", ())),
        )


@dataclass(eq=False, slots=True)
class Probing:
    """The probes of a policy over a run."""

    start: Probe = Probe()
    """The first step's probe, with the scores of that step's beginning."""
    _now: Probe = Probe()

    def before(self, policy: Weights, items: Sequence[TrainItem]) -> None:
        """Score a step's probe before its updates."""
        self._now = Probe.of(items).scored(policy)
        if not self.start.ids:
            self.start = self._now

    def after(self, policy: Weights) -> dict[str, float]:
        """Return the divergences after the updates by their names."""
        scores = policy.scores((*self._now.ids, *self.start.ids)) if self.start.ids else []
        size = len(self._now.ids)
        found = {
            "kl/step": self._now.divergence(scores[:size]),
            "kl/start": self.start.divergence(scores[size:]),
        }
        return {name: value for name, value in found.items() if value is not None}
