"""Changing an engine's weights so that it is known which ones it serves.

The engine is paused, made to load, and resumed. Then fixed token sequences, the *probes*, are
scored on both sides: an engine may accept a reload and go on serving stale layers, so nothing
counts before the numbers agree. When they do not, the previous weights are put back, and that is
checked against how the engine scored before.
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
"""Logits from 16 up are an eighth apart in bfloat16, on either side."""


class EngineControl(Protocol):
    """What publishing needs of an engine; ``EngineClient`` is one."""

    def pause(
        self, mode: Literal["keep", "wait", "abort"] = "wait", clear_cache: bool = True
    ) -> None: ...

    def resume(self) -> None: ...

    def is_paused(self) -> bool: ...

    def reload_weights(self, directory: str | Path) -> None: ...

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]: ...


class PublishError(BridleError):
    """The engine does not serve the new weights. It serves the previous ones, or see the text."""

    retryable = True

    def __init__(self, message: str, *, gap: float | None) -> None:
        super().__init__(message)
        self.gap = gap
        """Mean |engine − trainer| logprob that was found; ``None`` when loading itself failed."""


class VerifiedSwap:
    """Swaps the weights of one engine.

    ``announce(version)`` is called while the engine is paused, right after a load (also when going
    back), so that whoever stamps policy versions changes over at that moment.
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
        """How the engine scores the probes before it is given other weights.

        ``None`` when it is found paused, as a trainer leaves it that dies in mid-publish: it would
        not answer, and what it serves is not known.
        """
        if self._engine.is_paused():
            log.warning("the engine was left paused: what it serves is replaced unseen")
            return None
        return self._engine_scores()

    def serves(self, policy: Policy) -> bool:
        """Whether the engine answers, and scores the probes as ``policy`` does."""
        return not self._engine.is_paused() and self._gap(policy) <= self._tolerance(policy)

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
        """Make the engine serve ``policy``; returns the mean gap that the probes found.

        ``load`` gives the engine the weights of ``policy``, ``restore`` those of ``previous``;
        ``before`` is what :meth:`scores_before` said of the latter. Raises :class:`PublishError`.
        """
        gap: float | None = None
        tolerance = self._tolerance(policy)
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
            what = (
                f"version {version}: mean |engine - trainer| logprob is {gap:.2e}, more than "
                f"{tolerance:.0e}"
            )
            if gap <= TOLERANCE_IN_BFLOAT16:
                what += (
                    "; they may compute in different precisions (--precision of the trainer, "
                    "--dtype of the engine)"
                )
        outcome = self._go_back(restore, previous, before, tolerance)
        raise PublishError(f"{what}; {outcome}", gap=gap)

    def _go_back(
        self,
        restore: Callable[[], None],
        previous: int,
        before: Scores | None,
        tolerance: float,
    ) -> str:
        """Put the previous weights back; says how that went."""
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

    def _tolerance(self, policy: Policy) -> float:
        if self._config.tolerance is not None:
            return self._config.tolerance
        return TOLERANCE_IN_BFLOAT16 if weights_of(policy).is_rounded else TOLERANCE

    def _engine_scores(self) -> Scores:
        return [self._engine.score(probe.tolist()) for probe in self._probes]

    def _gap(self, policy: Policy) -> float:
        """Mean |engine − trainer| logprob over the probes now, nats."""
        return mean_gap(self._engine_scores(), weights_of(policy).scores(self._probes))

    def _swap(self, load: Callable[[], None], version: int) -> None:
        try:
            # A pause that was not waited for to its end comes about later all the same.
            self._engine.pause(mode=self._config.pause_mode, clear_cache=True)
            load()
            self._announce(version)
        finally:
            self._engine.resume()


def mean_gap(scores: Scores, others: Scores) -> float:
    """Mean |difference| over all tokens of all probes, nats; NaN when either side has one."""
    return float(np.abs(np.concatenate(scores) - np.concatenate(others)).mean())
