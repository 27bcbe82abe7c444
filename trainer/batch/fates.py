"""The fates of a step's sampled tokens, by session, over all policies that the step trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from bridle.reconstruct.samples.sample import Episode
from bridle.store.declaration import Part
from bridle.store.reading.conversation import ReplyId
from bridle.store.trained import SpanScores
from bridle.trainer.batch.filters import MaskReason, TokenAccount

_SCORES: Final = Part(SpanScores)

NO_UPDATE: Final = "gradient_not_finite"
"""The reason of tokens that are dropped because their step took no update: none of its gradients
was finite."""


@dataclass(frozen=True, slots=True)
class StepFates:
    """The fates of one session's sampled tokens in the step that took it."""

    session_id: str
    step: int
    """Number of the step, from 0."""
    version: int
    """Policy version after the step."""
    at: float
    """Unix time at which the step was complete."""
    tokens: Mapping[tuple[str, str], int]
    """Number of tokens by fate (``trained``, ``masked``, ``dropped``) and reason. They add up to
    the session's sampled tokens."""
    scores: tuple[SpanScores, ...] = ()
    """The scores of its trained tokens, if the run keeps them."""

    def as_data(self) -> list[Any]:
        """Return the plain data that a checkpoint keeps."""
        tokens = [[*fate, number] for fate, number in self.tokens.items()]
        scores = [_SCORES.row(each) for each in self.scores]
        return [self.session_id, self.step, self.version, self.at, tokens, scores]

    @classmethod
    def of_data(cls, data: Sequence[Any]) -> StepFates:
        """Return the value that :meth:`as_data` turned into ``data``."""
        session_id, step, version, at, tokens, scores = data
        fates = {(fate, reason): number for fate, reason, number in tokens}
        kept = tuple(SpanScores(**_SCORES.fields(row)) for row in scores)
        return cls(session_id, step, version, at, fates, kept)


def step_fates(
    episodes: Sequence[Episode],
    policies: Sequence[tuple[Sequence[TokenAccount], bool]],
    *,
    step: int,
    version: int,
    at: float,
    origin: str = "",
    scores: Mapping[ReplyId, SpanScores] = MappingProxyType({}),
) -> list[StepFates]:
    """Return the fates of a step's sessions.

    ``policies`` has, for each policy that the step trains, the account of each session and whether
    an update was taken. ``origin`` is the reason of trained tokens. ``scores`` has those of trained
    tokens, by the reply that they are of.
    """
    found = []
    for index, episode in enumerate(episodes):
        own = [
            accounts[index] if updated else _not_updated(accounts[index])
            for accounts, updated in policies
        ]
        tokens = _by_fate(merged(episode, own), origin)
        replies = {reply for sample in episode.samples for reply in sample.replies}
        kept = tuple(scores[reply] for reply in sorted(replies) if reply in scores)
        found.append(StepFates(episode.session.id, step, version, at, tokens, kept))
    return found


def merged(episode: Episode, accounts: Sequence[TokenAccount]) -> TokenAccount:
    """Merge the accounts of a session by several policies into one.

    Each policy accounts for all of the session's tokens, and counts those that another policy
    sampled as masked. The merged account counts each token once, as the policy that sampled it
    does.
    """
    total = sum(accounts, TokenAccount())
    again = len(accounts) - 1
    table = episode.conservation
    masked, dropped = Counter(total.masked), Counter(total.dropped)
    for counted, ruled in ((masked, table.masked), (dropped, table.dropped)):
        for reason, tokens in ruled.items():
            counted[reason] -= again * tokens
    masked[MaskReason.OTHER_POLICY.value] -= again * table.trained
    return TokenAccount(table.captured, total.trained, +masked, +dropped)


def _not_updated(account: TokenAccount) -> TokenAccount:
    dropped = account.dropped + Counter({NO_UPDATE: account.trained})
    return TokenAccount(account.captured, 0, account.masked, dropped)


def _by_fate(account: TokenAccount, origin: str) -> dict[tuple[str, str], int]:
    counted = {("trained", origin): account.trained}
    counted |= {("masked", str(reason)): tokens for reason, tokens in account.masked.items()}
    counted |= {("dropped", str(reason)): tokens for reason, tokens in account.dropped.items()}
    return {fate: tokens for fate, tokens in counted.items() if tokens}
