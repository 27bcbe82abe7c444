"""The rules that decide which sampled tokens are trained, and the one function that applies them.

Samples, every export, supervised fine-tuning, the ablation and the audit all use :func:`trainable`.
Each token that is not trained has exactly one reason. A format that can only train a whole message
trains a reply whose every sampled token is trained (:attr:`Ruling.whole`). All other replies are
context in it, also those of which samples train a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from bridle.reconstruct.conditions import Condition, call_meets
from bridle.reconstruct.samples.samplers import GRAMMAR, unscored
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import version_ranges
from bridle.store.reading.conversation import ReplyId
from bridle.store.reading.queries import CallRow, SpanRow
from bridle.store.records import CallKind, CallStatus, Span, is_frozen
from bridle.store.tree import DETACHED

SamplerRule = Literal["scored", "any"]
Excluded = tuple[int, int, str]
"""Start and end of a range of tokens that are not trained, and the reason."""
LOGPROB_MISSING: Final = "logprob_missing"
"""The reason for a token without a usable logprob from the engine."""

REPLAYED: Final = "replayed"
"""The reason for a reply that came from another session's record."""

_CALL_MARKS: Final = ("<tool_call>", "<|tool_call", "[TOOL_CALLS]", "<function=")
"""The texts with which the templates of Qwen, Hermes, Mistral and Llama models open a tool call.
They stay in the text if a call could not be parsed."""


@dataclass(frozen=True, slots=True)
class SampleRules:
    """The conditions under which tokens are trained.

    The default trains what the agent's own model did in calls that ended well.

    ``length`` finishes are trained, because the tokens were sampled and their logprobs hold. The
    trainer's filters decide whether a cut answer deserves its reward.
    """

    kinds: frozenset[CallKind] = frozenset({CallKind.MAIN, CallKind.SUBAGENT, CallKind.UNKNOWN})
    """Kinds of calls that are trained. Sub-agents share the policy's weights. A retry has a twin
    that the conversation went on from. An unknown kind is not evidence of a side task."""
    partial: bool = False
    """Train calls that were cut, whose ends are not the policy's decision."""
    finish_length: bool = True
    """Train replies that ended at the token limit."""
    parse_failed: bool = True
    """Train replies with a tool call that cannot be parsed: the policy sampled them, and an
    unanswered call earns what it deserves."""
    samplers: SamplerRule = "scored"
    """``scored``: train only tokens whose distribution the trainer can compute again
    (:func:`bridle.reconstruct.samples.samplers.unscored`). ``any``: train all, for imitation, which
    needs no distribution."""
    media: bool = False
    """Train calls whose prompt holds an image, sound or a file. The trainer and exports of tokens
    have only the tokens that stand for it, not what the engine saw."""
    models: frozenset[str] | None = None
    """Names of the served models that are trained; ``None`` for all. A model that is left out
    counts as frozen."""
    oldest_version: int | None = None
    """The oldest policy version that is trained; tokens of earlier versions are stale."""
    untrusted_versions: frozenset[int] = frozenset()
    """Policy versions whose publish was never verified, or was found wrong."""
    where: tuple[Condition, ...] = ()
    """Conditions on columns of the call, such as ``call.dialect=chat``; all must hold."""
    turn_reward: str | None = None
    """Train only calls whose own reward of this name is at least ``min_turn_reward``."""
    min_turn_reward: float = 0.0

    def __post_init__(self) -> None:
        for condition in self.where:
            if condition.of != "call":
                raise ValueError(f"{condition}: a rule is a condition on a call (call.NAME)")

    def as_data(self) -> dict[str, Any]:
        """Return these rules as JSON-ready data, equal for equal rules."""
        plain: dict[str, Any] = msgspec.to_builtins(self, order="sorted")
        return plain | {"where": [str(condition) for condition in self.where]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> SampleRules:
        """Return the rules that :meth:`as_data` wrote.

        Raise ``TypeError`` for unknown fields, and ``ValueError`` for values that a field does not
        accept.
        """
        known = [known.name for known in fields(cls)]
        for name in data:
            if name not in known:
                raise TypeError(f"there is no rule {name!r}; there are {', '.join(known)}")
        where = tuple(Condition.parse(text) for text in data.get("where", ()))
        try:
            rules = msgspec.convert({**data, "where": ()}, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"the rules cannot be read: {error}") from error
        return replace(rules, where=where)


DEFAULT_RULES: Final = SampleRules()


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision about one reply: the tokens that are not trained, each range with its reason."""

    tokens: int
    """Number of sampled tokens; 0 also if the engine reported no ids."""
    excluded: tuple[tuple[int, int, str], ...] = ()
    """Ranges ``(start, end, reason)`` of tokens that are not trained, ascending."""

    @property
    def whole(self) -> bool:
        """Return whether every token of the reply is trained, and so the message."""
        return not self.excluded

    def ranges(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the trained part of ``[start, end)``, as ranges within the reply."""
        found: list[tuple[int, int]] = []
        at = start
        for low, high, _ in self.excluded:
            if at < min(low, end):
                found.append((at, min(low, end)))
            at = max(at, high)
        if at < end:
            found.append((at, end))
        return tuple(found)

    def reasons(self, start: int, end: int) -> Counter[str]:
        """Return the number of tokens of ``[start, end)`` that are not trained, by reason."""
        found: Counter[str] = Counter()
        for low, high, reason in self.excluded:
            overlap = min(end, high) - max(start, low)
            if overlap > 0:
                found[reason] += overlap
        return found

    def mask(self) -> NDArray[np.bool_]:
        """Return ``bool[tokens]``, true where a token is trained."""
        trained = np.ones(self.tokens, dtype=np.bool_)
        for start, end, _ in self.excluded:
            trained[start:end] = False
        return trained


def rulings(session: LoadedSession, rules: SampleRules) -> dict[ReplyId, Ruling]:
    """Return the rulings on all replies of a session, calls in the order of their start."""
    return {
        ReplyId(call.id, choice): ruling
        for call in session.calls
        for choice, ruling in trainable(call, session, rules).items()
    }


def trainable(call: CallRow, session: LoadedSession, rules: SampleRules) -> dict[int, Ruling]:
    """Return the ruling on each reply of a call, by choice."""
    rows = session.sampled.get(call.id, ())
    reason = _excluded_call(call, session, rules)
    if rows:
        return {row.choice or 0: _ruling(call, row, rules, reason) for row in rows}
    found: dict[int, Ruling] = {}
    for choice in range(len(call.replies)):
        why = reason or _excluded_reply(call, choice, call.finish_reason, rules)
        found[choice] = Ruling(0) if why is None else Ruling(0, ((0, 0, why),))
    return found


def _ruling(call: CallRow, row: SpanRow, rules: SampleRules, reason: str | None) -> Ruling:
    tokens = len(row.span.token_ids)
    if row.span.start == DETACHED:
        reason = "prompt_unknown"
    reason = reason or _excluded_reply(call, row.choice or 0, row.finish_reason, rules)
    if reason is not None:
        return Ruling(tokens, ((0, tokens, reason),))
    unscored_tokens: list[Excluded] = []
    if rules.samplers == "scored":
        unscored_tokens = list(_apart(_under_grammar(call, tokens), _without_logprob(row.span)))
    if rules.oldest_version is None and not rules.untrusted_versions:
        return Ruling(tokens, tuple(unscored_tokens))
    versions = [
        (start, end, reason)
        for start, end, run in version_ranges(row.span)
        if (reason := _excluded_version(run.version, rules)) is not None
    ]
    return Ruling(tokens, _apart(versions, unscored_tokens))


def _under_grammar(call: CallRow, tokens: int) -> list[Excluded]:
    """Return the range of tokens that a grammar constrained."""
    sampler = call.sampler
    if sampler is None or not sampler.grammar or sampler.unconstrained >= tokens:
        return []
    return [(sampler.unconstrained, tokens, GRAMMAR)]


def _without_logprob(span: Span) -> list[Excluded]:
    """Return the ranges of tokens for which the engine gave no logprob."""
    if span.logprobs is None:
        return []
    missing = np.flatnonzero(np.isnan(span.logprobs))
    if not len(missing):
        return []
    groups = np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1)
    return [(int(group[0]), int(group[-1]) + 1, LOGPROB_MISSING) for group in groups]


def _apart(first: Sequence[Excluded], second: Sequence[Excluded]) -> tuple[Excluded, ...]:
    """Merge both lists into one, ascending and without overlaps.

    Where both exclude a token, the reason of ``first`` is kept.
    """
    found = list(first)
    for start, end, reason in second:
        at = start
        for low, high, _ in sorted(first):
            if at < min(low, end):
                found.append((at, min(low, end), reason))
            at = max(at, high)
        if at < end:
            found.append((at, end, reason))
    return tuple(sorted(found))


def _excluded_call(call: CallRow, session: LoadedSession, rules: SampleRules) -> str | None:
    """Return the reason why no token of a call is trained.

    The result is ``None`` if that depends on the reply.
    """
    if (reason := _excluded_status(call, rules)) is not None:
        return reason
    if call.kind not in rules.kinds:
        return f"kind_{call.kind}"
    if is_frozen(call.notes):
        return "model_frozen"
    if rules.models is not None and call.model_served not in rules.models:
        return "model_frozen"
    if rules.samplers == "scored" and (reason := unscored(call.sampler)) is not None:
        return reason
    if not rules.media and call.id in session.with_media:
        return "prompt_media"
    if rules.where and not call_meets(rules.where, call):
        return "call_condition"
    if rules.turn_reward is None:
        return None
    value = session.turn_rewards(rules.turn_reward).get(call.id)
    if value is None:
        return "turn_without_reward"
    return None if value >= rules.min_turn_reward else "turn_reward_too_low"


def _excluded_status(call: CallRow, rules: SampleRules) -> str | None:
    """Return the reason why no token of a call that came and ended so is trained, or ``None``."""
    status = call.status
    if call.replayed_call_id is not None:
        return REPLAYED
    if status is CallStatus.QUARANTINED:
        return "quarantined"
    if status is CallStatus.PARTIAL:
        return None if rules.partial else "partial"
    return None if status is CallStatus.COMPLETE else f"status_{status}"


def _excluded_reply(
    call: CallRow, choice: int, finish_reason: str | None, rules: SampleRules
) -> str | None:
    """Return the reason why no token of one reply is trained, or ``None``."""
    if not rules.finish_length and finish_reason == "length":
        return "finish_length"
    if not rules.parse_failed and parse_failed(call, choice):
        return "parse_failed"
    return None


def _excluded_version(version: int, rules: SampleRules) -> str | None:
    """Return the reason why tokens of a policy version are not trained, or ``None``."""
    if version in rules.untrusted_versions:
        return "version_untrusted"
    if rules.oldest_version is not None and version < rules.oldest_version:
        return "version_stale"
    return None


def parse_failed(call: CallRow, choice: int = 0) -> bool:
    """Return whether a reply has a tool call that cannot be parsed.

    The call's arguments are not a JSON object, or the engine's parser left the call in the text.
    """
    if choice >= len(call.replies):
        return False
    message = call.replies[choice]
    if any(mark in str(message.content or "") for mark in _CALL_MARKS):
        return True
    return not all(_is_object(tool_call.arguments) for tool_call in message.tool_calls)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments or "{}"), dict)
    except orjson.JSONDecodeError:
        return False
