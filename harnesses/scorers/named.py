"""Scorers from their names."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from bridle.harnesses.scorers.session import FinishedSession
from bridle.harnesses.verifiers.delivery import (
    REWARD,
    FunctionFault,
    Judgement,
    NoVerdict,
    Score,
    Verdict,
    VerifierError,
    fault_of,
    scores_in,
    verdict_of,
)
from bridle.harnesses.verifiers.separate import NotSeparate, SeparateProcess
from bridle.registry import Options, Registry, require_parts

ScorerFunction = Callable[..., Judgement | Awaitable[Judgement]]
SCORERS: Final[Registry[ScorerFunction]] = Registry(
    "scorer",
    "bridle.scorers",
    {
        "cost": "bridle.harnesses.scorers.usage:cost",
        "format": "bridle.harnesses.scorers.form:form",
        "rubric": "bridle.harnesses.scorers.rubric:rubric",
    },
)
"""The scorers. A part is a function from a :class:`FinishedSession` to the value that a verifier
may return. A plain function runs in a process of its own, and an ``async`` one in the run's."""


class Scorer(Protocol):
    """A scorer with its name."""

    @property
    def name(self) -> str:
        """The name under which it reports: that of the function, or its registered name."""

    async def __call__(self, session: FinishedSession) -> tuple[Score, ...]:
        """Return the session's rewards. Raise :class:`VerifierError` without any."""


@dataclass(frozen=True, slots=True)
class NamedScorer:
    """A scorer whose rewards begin with its name: a number is ``NAME``, others ``NAME.OTHER``."""

    name: str
    score: Callable[[FinishedSession], Awaitable[Verdict]]

    async def __call__(self, session: FinishedSession) -> tuple[Score, ...]:
        try:
            verdict = await self.score(session)
        except NotSeparate as error:
            raise FunctionFault(f"it cannot run in a process of its own: {error}") from error
        except VerifierError as error:
            raise type(error)(str(error).replace("the verifier", "the scorer")) from error
        return tuple(replace(one, name=self._named(one.name)) for one in scores_in(verdict))

    def _named(self, name: str) -> str:
        return self.name if name in (REWARD, self.name) else f"{self.name}.{name}"


def scorers(
    named: Iterable[str], options: Options = MappingProxyType({})
) -> tuple[NamedScorer, ...]:
    """Return the scorers ``named``, of :data:`SCORERS`, with their own of ``options``.

    Raise the errors of :meth:`bridle.registry.Registry.configured`.
    """
    names = tuple(named)
    require_parts(options, *((SCORERS, one) for one in names))
    return tuple(_scorer(one, options) for one in names)


def _scorer(named: str, options: Options) -> NamedScorer:
    name = named.rpartition(":")[2]
    reference = SCORERS.reference(named)
    function = SCORERS.configured(named, options)
    if reference is None or inspect.iscoroutinefunction(SCORERS.get(named)):
        return NamedScorer(name, _Within(function))
    return NamedScorer(name, _Apart(SeparateProcess("scorer", reference, options.get(name, {}))))


@dataclass(frozen=True, slots=True)
class _Apart:
    process: SeparateProcess

    async def __call__(self, session: FinishedSession) -> Verdict:
        return await self.process.ask(session.sendable())


@dataclass(frozen=True, slots=True)
class _Within:
    function: ScorerFunction

    async def __call__(self, session: FinishedSession) -> Verdict:
        within = session.bounds.verifier_s or None
        try:
            return verdict_of(await asyncio.wait_for(_judged(self.function, session), within))
        except TimeoutError as error:
            raise NoVerdict(f"it took more than {within:g} s (agent.bounds.verifier_s)") from error
        except VerifierError:
            raise
        except Exception as error:
            raise fault_of(self.function, error) from error


async def _judged(function: ScorerFunction, session: FinishedSession) -> Any:
    given = function(session)
    return await given if isinstance(given, Awaitable) else given
