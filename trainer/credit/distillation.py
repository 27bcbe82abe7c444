"""Credit from a teacher that scores the policy's own tokens: on-policy distillation.

Each trained token's credit gets

    ``coefficient * (log π_T(token | prefix) - log π(token | prefix))``

on top of the estimator's, with ``log π`` as it was recorded when the token was sampled. Over tokens
drawn from ``π`` the expected difference is the negative reverse KL divergence, ``-KL(π || π_T)`` at
that prefix, so the policy is drawn to what the teacher finds likely at the prefixes that the policy
itself samples.

Sources: On-Policy Distillation of Language Models (GKD, arXiv 2306.13649); MiniLLM (arXiv
2306.08543); as an advantage per token, On-Policy Distillation (Thinking Machines Lab, 2025).

The teacher is an engine that speaks the contract, such as a vLLM server, or an average of the
policy itself. It scores exactly the sample's token ids, so it must have the policy's tokenizer. Its
prompt may hold a context that the policy's did not (:mod:`.privileged`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.client import (
    EngineClient,
    EngineError,
    EngineRefused,
    EngineUnreachable,
)
from bridle.errors import BridleError
from bridle.reconstruct.samples.sample import Sample
from bridle.trainer.config import DistillationConfig

REQUEST_TIMEOUT_S: Final = 600.0
"""Seconds until a request fails. It waits for the others that the teacher computes, and a long
sample takes a while."""

AskTeacher = Callable[[Sequence[Sample]], list[NDArray[np.float32]]]
"""A function from samples to the differences that :meth:`Teacher.gaps` returns for them."""


class TeacherError(BridleError):
    """The teacher refused a request, or its reply cannot be used."""


class TeacherUnreachable(TeacherError):
    """The teacher does not reply."""

    retryable = True


@dataclass(frozen=True, slots=True)
class TeacherGap:
    """The difference between the teacher and the policy over a step."""

    tokens: int
    """Number of trained tokens that the teacher has scored."""
    mean: float
    """Mean ``log π_T - log π`` in nats before any bound: an estimate of ``-KL(π || π_T)``; NaN
    without tokens."""
    clipped: float
    """Share of the tokens whose difference is bounded; NaN without tokens."""
    without_context: int = 0
    """Number of sessions that were not taught because there was no context for them."""

    @classmethod
    def of(
        cls, gaps: NDArray[np.float32], config: DistillationConfig, without_context: int = 0
    ) -> TeacherGap:
        """Summarize ``gaps``, the differences of ``N`` tokens as ``float32[N]``."""
        if not len(gaps):
            return cls(0, float("nan"), float("nan"), without_context)
        beyond = np.abs(gaps) > (config.clip or np.inf)
        mean = float(gaps.mean(dtype=np.float64))
        return cls(len(gaps), mean, float(beyond.mean()), without_context)


def taught(
    credit: NDArray[np.float32], gap: NDArray[np.float32], config: DistillationConfig
) -> NDArray[np.float32]:
    """Return a sample's credit with the teacher's part, ``float32[T]``; NaN stays NaN.

    ``credit`` is the estimator's, ``float32[T]``. ``gap`` is what :meth:`Teacher.gaps` returns for
    the sample.
    """
    bound = config.clip or np.inf
    bounded: NDArray[np.float32] = gap.clip(-bound, bound)
    return credit + np.float32(config.coefficient) * bounded


def gap_of(
    sample: Sample,
    score: Callable[[NDArray[np.uint32]], NDArray[np.float32]],
    teacher: str = "the teacher",
) -> NDArray[np.float32]:
    """Return what :meth:`Teacher.gaps` does for one sample.

    ``score`` returns the logprobs of some ids but the first one, and is asked for those up to the
    last trained one. Raise :class:`TeacherError` for logprobs that are not finite.
    """
    gap = np.zeros(len(sample.token_ids), np.float32)
    trained = np.flatnonzero(sample.mask)
    if not len(trained):
        return gap
    scores = score(sample.token_ids[: trained[-1] + 1])
    if not np.isfinite(scores).all():
        raise TeacherError(
            f"{teacher} scored tokens of session {sample.session_id} with values that are not "
            "finite: its weights or its precision are at fault"
        )
    gap[trained] = scores[trained - 1] - sample.logprobs[trained]
    return gap


class Teacher:
    """A model that scores samples, behind the URL of ``config``. It is a context manager.

    ``api_key`` is sent as a bearer token.
    """

    def __init__(self, config: DistillationConfig, *, api_key: str | None = None) -> None:
        self._config = config
        self._engine = EngineClient(config.url, timeout=REQUEST_TIMEOUT_S, api_key=api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.close()

    def served(self) -> str:
        """Return the model name of requests.

        It is the configured name, or the first that the teacher serves. Raises
        :class:`TeacherError` if the teacher does not answer.
        """
        try:
            first = self._engine.model().id
        except EngineError as error:
            raise self._failed(error) from error
        return self._config.model or first

    def gaps(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return ``log π_T - log π`` of each sample's tokens in nats, ``float32[T]``.

        It is 0 except at trained tokens. Several samples are scored at a time, each up to its last
        trained token. Raises :class:`TeacherError`; then no sample has a result.
        """
        model = self.served()
        with ThreadPoolExecutor(self._config.parallel, "teacher") as requests:
            return list(requests.map(lambda sample: self._gap(sample, model), samples))

    def _gap(self, sample: Sample, model: str) -> NDArray[np.float32]:
        def score(ids: NDArray[np.uint32]) -> NDArray[np.float32]:
            try:
                return self._engine.score(ids.tolist(), model=model)
            except EngineError as error:
                raise self._failed(error, sample.session_id, ids) from error

        return gap_of(sample, score, f"the teacher at {self._engine.base_url}")

    def _failed(
        self,
        error: EngineError,
        session_id: str | None = None,
        ids: NDArray[np.uint32] | None = None,
    ) -> TeacherError:
        """Return ``error`` as a :class:`TeacherError` with the teacher's address and the remedy."""
        where = f"the teacher at {self._engine.base_url}"
        if isinstance(error, EngineUnreachable):
            return TeacherUnreachable(
                f"{where} does not answer: {error} Start it, or name another as distillation.url"
            )
        status = error.status if isinstance(error, EngineRefused) else None
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            remedy = "distillation.key_variable names the environment variable that has its key"
        elif status == httpx.codes.NOT_FOUND:
            remedy = "distillation.url is its base URL, without /v1, distillation.model its name"
        elif ids is not None:
            remedy = (
                f"it must have the policy's tokenizer, with id {ids.max()}, and a context of "
                f"{len(ids) + 1} tokens or more"
            )
        else:
            remedy = "distillation.url must be that of an engine such as vLLM"
        asked = "" if session_id is None else f" does not score session {session_id}"
        return TeacherError(f"{where}{asked}: {error}; {remedy}")
