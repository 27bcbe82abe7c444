"""The sessions to train on, and an account of all tokens that are not trained.

No token disappears: over a step's sessions, ``captured = trained + masked + dropped`` holds, with a
reason for every token that is not trained. Reasons from before the trainer come from the session's
:class:`bridle.reconstruct.samples.sample.Conservation`; the trainer's own are :class:`DropReason`
and :class:`MaskReason`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridle.errors import BridleError
from bridle.reconstruct.rewards import quarantined
from bridle.reconstruct.samples.sample import Episode
from bridle.trainer.config import FilterConfig
from bridle.trainer.filters import FILTERS


class DropReason(StrEnum):
    """The trainer's reasons not to train on a session."""

    UNREWARDED = "unrewarded"
    """The session has no reward, or not all that the configuration names."""
    INFRASTRUCTURE = "infrastructure"
    """The session's outcome is one that :attr:`FilterConfig.outcomes` drops or excludes."""
    STALE = "stale"
    """All tokens that the session would train were sampled more than ``max_staleness`` versions
    ago."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of the session's group are equal, so there is nothing to learn from comparing
    them."""
    WEIGHTLESS = "weightless"
    """The session has tokens to train, but only in samples of weight 0."""
    RESAMPLED = "resampled"
    """GRPO-RoC has kept other sessions of the group
    (:mod:`bridle.trainer.filters.resample_on_correct`)."""
    NO_CONTEXT = "no_context"
    """There was no context for the teacher (:mod:`bridle.trainer.credit.privileged`), and the
    session's reward alone gives its tokens no advantage."""
    EMPTY = "empty"
    """The session has no token to train."""


class MaskReason(StrEnum):
    """The trainer's reasons not to train a token of a session that it trains."""

    STALE = "stale"
    """The token was sampled more than ``max_staleness`` versions ago."""
    NO_BASELINE = "no_baseline"
    """The estimator had nothing to compare the token with."""
    OTHER_POLICY = "other_policy"
    """The token was sampled by another policy than the one that is trained."""
    VERSION_AHEAD = "version_ahead"
    """The token was recorded at a version that this training has not reached."""


class FilterFailed(BridleError):
    """A filter of the run's own returned no decision."""


class ConservationError(BridleError):
    """A session's tokens do not add up, so it must not be trained on."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """The account of some sessions' sampled tokens."""

    captured: int = 0
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    """Number of masked tokens by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped tokens by reason."""

    @property
    def balanced(self) -> bool:
        return self.captured == self.trained + self.masked.total() + self.dropped.total()

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(
            captured=self.captured + other.captured,
            trained=self.trained + other.trained,
            masked=self.masked + other.masked,
            dropped=self.dropped + other.dropped,
        )


def account_of(episode: Episode, reason: str | None) -> TokenAccount:
    """Return the account of one session.

    ``reason`` drops all of its trainable tokens; ``None`` trains them.

    Raises :class:`ConservationError` if the session's own table does not add up or does not agree
    with the masks of its samples.
    """
    table = episode.conservation
    trainable = trained_tokens(episode)
    if not table.balanced or table.trained != trainable:
        raise ConservationError(
            f"session {episode.session.id}: {table} does not account for its {trainable} trainable "
            "tokens; run `bridle audit` on it"
        )
    dropped = Counter(dict(table.dropped))
    if reason is not None and trainable:
        dropped[str(reason)] += trainable
    return TokenAccount(
        captured=table.captured,
        trained=trainable if reason is None else 0,
        masked=Counter(dict(table.masked)),
        dropped=dropped,
    )


def masked(episode: Episode, excluded: Sequence[NDArray[np.bool_]], reason: str) -> Episode:
    """Return ``episode`` without the tokens that ``excluded`` marks in each sample.

    The masks and the account change alike.
    """
    samples = tuple(
        replace(sample, mask=sample.mask & ~out)
        for sample, out in zip(episode.samples, excluded, strict=True)
    )
    table = episode.conservation
    kept = sum(int(sample.mask.sum()) for sample in samples)
    if kept == table.trained:
        return episode
    counts = Counter(dict(table.masked))
    counts[str(reason)] += table.trained - kept
    return replace(
        episode, samples=samples, conservation=replace(table, trained=kept, masked=dict(counts))
    )


def trained_tokens(episode: Episode) -> int:
    """Return the number of tokens that the session's samples train."""
    return sum(int(sample.mask.sum()) for sample in episode.samples)


def outcome_of(episode: Episode) -> str:
    """Return the outcome by which a session is judged.

    It is ``quarantined`` also if a finding that was recorded after the end of the session says so.
    """
    return "quarantined" if quarantined(episode.rewards) else episode.session.outcome or ""


def outside_the_baseline(
    episode: Episode, reward: float | None, config: FilterConfig
) -> DropReason | None:
    """Return the reason why a session does not count in the baseline, or ``None`` if it does.

    A session that does not count says nothing about how good its group is.
    """
    if config.outcomes.get(outcome_of(episode)) == "exclude":
        return DropReason.INFRASTRUCTURE
    if reward is None:
        return DropReason.UNREWARDED
    return None


def not_trained(
    episode: Episode,
    *,
    degenerate_group: bool,
    version: int,
    max_staleness: int,
    config: FilterConfig,
) -> str | None:
    """Return the reason why a session that counted in its group's baseline is not trained on.

    ``None`` means that it is trained on. ``version`` is the version about to be trained. The reason
    is a :class:`DropReason`; :func:`filtered` has those of ``config.extra``.
    """
    if trained_tokens(episode) == 0:
        return DropReason.EMPTY
    if config.outcomes.get(outcome_of(episode)) == "drop":
        return DropReason.INFRASTRUCTURE
    if all(sample.weight <= 0 for sample in episode.samples if sample.mask.any()):
        return DropReason.WEIGHTLESS
    if version - newest_version(episode) > max_staleness:
        return DropReason.STALE
    if degenerate_group and config.drop_zero_variance:
        return DropReason.ZERO_VARIANCE
    return None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The decisions of a run's further filters about one session."""

    reason: str | None = None
    """The name of the first filter that leaves the session out, or ``None``."""
    tokens: Mapping[str, Sequence[NDArray[np.bool_]]] = field(default_factory=dict)
    """The tokens of each sample that are not trained, by the name of the filter."""


def filtered(episode: Episode, config: FilterConfig) -> Judgement:
    """Return the decisions of ``config.extra`` about a session.

    Raise :class:`FilterFailed` for a decision in none of the forms of
    :data:`bridle.trainer.filters.Filtered`.
    """
    tokens: dict[str, list[NDArray[np.bool_]]] = {}
    for each in config.extra:
        name = each.rpartition(":")[2]
        decision = FILTERS.configured(each, config.options)(episode)
        if isinstance(decision, bool | np.bool_):
            if not decision:
                return Judgement(name)
            continue
        tokens[name] = excluded(episode, name, decision)
    return Judgement(None, tokens)


def excluded(episode: Episode, name: str, decision: Any) -> list[NDArray[np.bool_]]:
    """Return the tokens of each sample that a filter's decision about calls or tokens leaves out.

    Raise :class:`FilterFailed` for a decision in another form.
    """
    shapes = [sample.mask.shape for sample in episode.samples]
    try:
        given = list(decision)
        if given and not any(isinstance(one, str) for one in given):
            marks = [np.asarray(one, np.bool_) for one in given]
            if [one.shape for one in marks] != shapes:
                raise ValueError("it has no array of each sample's length")
            return marks
        calls = set(given)
    except (TypeError, ValueError) as error:
        raise FilterFailed(
            f"the filter {name} returned no decision about session {episode.session.id}: return "
            f"whether it is trained, ids of calls, or bool[T] for each sample ({error})"
        ) from error
    return [
        np.isin(sample.calls, [n for n, one in enumerate(sample.call_ids) if one in calls])
        for sample in episode.samples
    ]


def newest_version(episode: Episode) -> int:
    """Return the newest policy version among the tokens that the session would train.

    Raises ``ValueError`` if it would train none.
    """
    return max(
        int(np.max(sample.versions[sample.mask])) for sample in episode.samples if sample.mask.any()
    )
