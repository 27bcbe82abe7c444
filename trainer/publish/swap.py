"""The change of an engine's weights, verified so that it is known which ones it serves.

The engine is paused, made to load, and resumed. Then fixed token sequences, the *probes*, are
scored on both sides: an engine may accept a reload and go on serving stale layers, so a change
counts only once the numbers agree. If they do not, the previous weights are put back, and the
engine's scores are compared with those before the change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.client import EngineError
from bridle.errors import BridleError
from bridle.trainer.config import PublishConfig
from bridle.trainer.policy.weights import Policy, Probes, Scores, weights_of

log = logging.getLogger(__name__)

TOLERANCE: Final = 1e-3
TOLERANCE_IN_BFLOAT16: Final = 0.1
"""Tolerance in bfloat16, in which logits from 16 up are an eighth apart, on either side."""


class EngineControl(Protocol):
    """The operations of an engine that publishing needs; ``EngineClient`` has them."""

    def pause(
        self, mode: Literal["keep", "wait", "abort"] = "wait", clear_cache: bool = True
    ) -> None: ...

    def resume(self) -> None: ...

    def is_paused(self) -> bool: ...

    def reload_weights(self, directory: str | Path) -> None: ...

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]: ...


class PublishError(BridleError):
    """The engine does not serve the new weights.

    It serves the previous ones unless the message says otherwise.
    """

    retryable = True

    def __init__(self, message: str, *, gap: float | None) -> None:
        super().__init__(message)
        self.gap = gap
        """Mean |engine − trainer| logprob of the probes, or ``None`` if loading itself failed."""


class VerifiedSwap:
    """A verified swap of one engine's weights.

    ``announce(version)`` is called while the engine is paused, right after a load (also when going
    back), so that the policy version stamped on calls changes at that moment.
    """

    def __init__(
        self,
        engine: EngineControl,
        probes: Probes,
        config: PublishConfig,
        announce: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._probes = tuple(probes)
        self._config = config
        self._announce = announce

    def scores_before(self) -> Scores | None:
        """Return the engine's scores of the probes before it receives other weights.

        Return ``None`` if it is paused, as a trainer that dies during a publish leaves it: it would
        not answer, and the weights that it serves are unknown.
        """
        if self._engine.is_paused():
            log.warning("the engine was left paused: what it serves is replaced unseen")
            return None
        return self._engine_scores()

    def serves(self, policy: Policy) -> bool:
        """Return whether the engine answers, and scores the probes as ``policy`` does."""
        if self._engine.is_paused():
            return False
        return self._gap(policy) <= tolerance_of(policy, self._config)

    def run(
        self,
        policy: Policy,
        *,
        load: Callable[[], None],
        version: int,
        restore: Callable[[], None],
        previous: int,
        before: Scores | None,
    ) -> float:
        """Make the engine serve ``policy``; return the mean gap over the probes.

        ``load`` gives the engine the weights of ``policy``, ``restore`` those of ``previous``;
        ``before`` is the result of :meth:`scores_before` for the latter. Raises
        :class:`PublishError`.
        """
        gap: float | None = None
        tolerance = tolerance_of(policy, self._config)
        try:
            self._swap(load, version)
            gap = self._gap(policy)
        except EngineError as error:
            what = f"version {version} could not be loaded: {error}"
        except BaseException as error:
            # Interrupted, or the version could not be announced: tokens must not be sampled from
            # weights that they are not stamped with.
            error.add_note(self._go_back(restore, previous, before, tolerance))
            raise
        else:
            if gap <= tolerance:
                return gap
            what = too_far(version, gap, tolerance)
        outcome = self._go_back(restore, previous, before, tolerance)
        raise PublishError(f"{what}; {outcome}", gap=gap)

    def _go_back(
        self,
        restore: Callable[[], None],
        previous: int,
        before: Scores | None,
        tolerance: float,
    ) -> str:
        """Put the previous weights back; return the outcome as text."""
        try:
            self._swap(restore, previous)
            after = self._engine_scores()
        except EngineError as error:
            return (
                f"version {previous} could not be put back either ({error}): restart the engine "
                "before going on"
            )
        if before is None:
            return (
                f"version {previous} was put back into an engine that had been left paused, and "
                "nothing tells how it should score: restart the engine before going on"
            )
        if not mean_gap(after, before) <= tolerance:
            return (
                f"version {previous} was put back, but the engine does not score as it did before: "
                "restart the engine before going on"
            )
        return f"the engine serves version {previous} again"

    def _engine_scores(self) -> Scores:
        return [self._engine.score(probe.tolist()) for probe in self._probes]

    def _gap(self, policy: Policy) -> float:
        """Return the mean |engine − trainer| logprob over the probes now, in nats."""
        return mean_gap(self._engine_scores(), weights_of(policy).scores(self._probes))

    def _swap(self, load: Callable[[], None], version: int) -> None:
        try:
            # A pause that was not waited for to its end comes about later all the same.
            self._engine.pause(mode=self._config.pause_mode, clear_cache=True)
            load()
            self._announce(version)
        finally:
            self._engine.resume()


def tolerance_of(policy: Policy, config: PublishConfig) -> float:
    """Return the largest gap with which the engine counts as serving ``policy``, in nats."""
    if config.tolerance is not None:
        return config.tolerance
    return TOLERANCE_IN_BFLOAT16 if weights_of(policy).is_rounded else TOLERANCE


def too_far(version: int, gap: float, tolerance: float) -> str:
    """Return the text of an error about a gap above the tolerance."""
    what = (
        f"version {version}: mean |engine - trainer| logprob is {gap:.2e}, more than "
        f"{tolerance:.0e}"
    )
    if gap <= TOLERANCE_IN_BFLOAT16:
        what += (
            "; they may compute in different precisions (compute.precision of the trainer, "
            "--dtype of the engine)"
        )
    return what


def mean_gap(scores: Scores, others: Scores) -> float:
    """Return the mean |difference| over all tokens of all probes, in nats.

    It is NaN if either side has a NaN.
    """
    return float(np.abs(np.concatenate(scores) - np.concatenate(others)).mean())
