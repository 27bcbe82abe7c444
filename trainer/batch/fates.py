"""Where the sampled tokens of a step's sessions went, over all policies that the step trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.batch.filters import MaskReason, TokenAccount

NO_UPDATE: Final = "gradient_not_finite"
"""Why tokens are dropped whose step took no update: none of its gradients was finite."""


@dataclass(frozen=True, slots=True)
class StepFates:
    """Where one session's sampled tokens went in the step that took it."""

    session_id: str
    step: int
    """From 0."""
    version: int
    """Policy version after the step."""
    at: float
    """When the step was complete."""
    tokens: Mapping[tuple[str, str], int]
    """By fate (``trained``, ``masked``, ``dropped``) and reason. They add up to the session's."""

    def as_data(self) -> list[Any]:
        """What a checkpoint keeps of it."""
        tokens = [[*fate, number] for fate, number in self.tokens.items()]
        return [self.session_id, self.step, self.version, self.at, tokens]

    @classmethod
    def of_data(cls, data: Sequence[Any]) -> StepFates:
        """What :meth:`as_data` has kept."""
        session_id, step, version, at, tokens = data
        fates = {(fate, reason): number for fate, reason, number in tokens}
        return cls(session_id, step, version, at, fates)


def step_fates(
    episodes: Sequence[Episode],
    policies: Sequence[tuple[Sequence[TokenAccount], bool]],
    *,
    step: int,
    version: int,
    at: float,
) -> list[StepFates]:
    """The fates of a step's sessions. ``policies`` are, for each policy that it trains, the account
    of each session and whether an update was taken."""
    found = []
    for index, episode in enumerate(episodes):
        own = [
            accounts[index] if updated else _not_updated(accounts[index])
            for accounts, updated in policies
        ]
        tokens = _by_fate(merged(episode, own))
        found.append(StepFates(episode.session.id, step, version, at, tokens))
    return found


def merged(episode: Episode, accounts: Sequence[TokenAccount]) -> TokenAccount:
    """One account of a session from those of several policies.

    Each policy accounts for all of the session's tokens, and for those that another has sampled as
    masked. A token is counted once here, as the policy has it that sampled it.
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


def _by_fate(account: TokenAccount) -> dict[tuple[str, str], int]:
    counted = {("trained", ""): account.trained}
    counted |= {("masked", str(reason)): tokens for reason, tokens in account.masked.items()}
    counted |= {("dropped", str(reason)): tokens for reason, tokens in account.dropped.items()}
    return {fate: tokens for fate, tokens in counted.items() if tokens}
