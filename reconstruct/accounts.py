"""The token accounts: the fate of every sampled token.

They serve the report of a run, ``bridle audit``, the viewer and exports. The fates of tokens that
training has taken are read from the store (``store/schema/accounts.py``). Tokens that no training
has taken and that the rules allow are ``trainable``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bridle.reconstruct.samples.builders import build, not_built
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.samples.sample import Conservation
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.errors import NotFound
from bridle.store.reading.accounts import (
    TokenAccount,
    WrittenAccount,
    stored_account,
    uncounted_sessions,
    written_accounts,
)
from bridle.store.reading.queries import Reader
from bridle.store.reading.session_filter import SessionFilter
from bridle.store.schema.accounts import TRAINABLE, UNCOUNTED, Fate

_AT_ONCE: Final = 500
"""Sessions in one query."""
_MOST_SESSIONS: Final = 100
"""Maximum sessions whose tokens a page counts itself."""
_ORDER: Final = {"trained": 0, "trainable": 1, "masked": 2, "dropped": 3, "uncounted": 4}


@dataclass(frozen=True, slots=True)
class AccountLine:
    """A line of the table of an account."""

    fate: Fate
    tokens: int

    @property
    def label(self) -> str:
        """The fate with its reason, or the fate alone.

        Examples are ``dropped: zero_variance`` and ``trained``.
        """
        return f"{self.fate.fate}: {self.fate.reason}" if self.fate.reason else self.fate.fate


def account_lines(fates: Mapping[Fate, int]) -> list[AccountLine]:
    """Return the table of an account, ordered by fate and then by number of tokens, largest first.

    Its first line is ``trained`` if a training run has taken any of the tokens, else ``trainable``.
    """
    first = Fate("trained") if any(one.fate == "trained" for one in fates) else TRAINABLE
    shown = {first: 0, **fates}
    ordered = sorted(shown.items(), key=lambda one: (_ORDER.get(one[0].fate, 5), -one[1]))
    return [AccountLine(fate, tokens) for fate, tokens in ordered]


def session_fates(written: WrittenAccount, ruled: Conservation) -> dict[Fate, int]:
    """Return one session's account.

    It is ``written`` if that is final, else ``ruled``, the account that the rules give.
    """
    if written.is_final:
        return dict(written.tokens)
    return {Fate(*fate): tokens for fate, tokens in ruled.by_fate(TRAINABLE).items()}


class StatedRules:
    """The sample rules that each run states in its configuration."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._known: dict[str | None, SampleRules] = {None: DEFAULT_RULES}

    def of(self, run_id: str | None) -> SampleRules:
        """Return the rules of a run; the default rules if it has stated none or is not stored."""
        if run_id not in self._known:
            try:
                samples = self._reader.run(str(run_id)).config.get("samples")
            except NotFound:
                samples = None
            rules = SampleRules.from_data(samples["rules"]) if samples else DEFAULT_RULES
            self._known[run_id] = rules
        return self._known[run_id]


def token_account(
    reader: Reader,
    wanted: SessionFilter,
    rules: SampleRules | None = None,
    *,
    most: int | None = None,
) -> TokenAccount:
    """Return the account of the sessions that match.

    With ``wanted.run``, it is the account of all sessions that belong to the run. Sessions without
    an account are counted by ``rules``, or by the rules of their own runs if it is ``None``. At
    most ``most`` of their sampled tokens are counted, for a page that must load quickly. The
    remaining tokens are ``uncounted``.
    """
    account = stored_account(reader, wanted)
    if not account.of(UNCOUNTED.fate):
        return account
    written: dict[str, WrittenAccount] = {}
    ids = uncounted_sessions(reader, wanted, None if most is None else _MOST_SESSIONS)
    for start in range(0, len(ids), _AT_ONCE):
        some = SessionFilter(run=wanted.run, sessions=ids[start : start + _AT_ONCE])
        written |= written_accounts(reader, some)
    left = {session_id: written[session_id].uncounted for session_id in ids}
    fates = Counter(dict(account.fates))
    stated = StatedRules(reader)
    for session in LoadedSession.stream(reader, map(reader.session, _first(left, most))):
        try:
            ruled = build(session, rules or stated.of(session.record.run_id)).conservation
        except BrokenTree:
            ruled = not_built(session)
        fates[UNCOUNTED] -= left[session.id]
        fates.update(session_fates(written[session.id], ruled))
    return replace(account, fates={fate: tokens for fate, tokens in fates.items() if tokens})


def account_of_sessions(reader: Reader, ids: Sequence[str]) -> TokenAccount:
    total = TokenAccount(0, {}, frozenset())
    for start in range(0, len(ids), _AT_ONCE):
        some = SessionFilter(sessions=ids[start : start + _AT_ONCE])
        total += token_account(reader, some)
    return total


def _first(left: Mapping[str, int], most: int | None) -> list[str]:
    """Return the first sessions that together have at most ``most`` tokens.

    If ``most`` is ``None``, return all.
    """
    if most is None:
        return list(left)
    found, total = [], 0
    for session_id, tokens in left.items():
        total += tokens
        if total > most:
            break
        found.append(session_id)
    return found
