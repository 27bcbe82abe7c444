"""Which sampled tokens may be trained: a stated policy, stored with the samples that it made.

Everything else is named: each token that is not trained has exactly one reason, the first that
applies in the order of :func:`untrainable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import orjson

from bridle.reconstruct.conversation import replies
from bridle.store.reading.queries import CallRow, SpanRow
from bridle.store.records import CallKind, CallStatus, VersionRun, is_frozen
from bridle.store.tree import DETACHED

_CALL_MARKS: Final = ("<tool_call>", "<|tool_call", "[TOOL_CALLS]", "<function=")
"""How the templates of Qwen, Hermes, Mistral and Llama models open a tool call: left in the text
where a call could not be parsed."""


@dataclass(frozen=True, slots=True)
class TrainablePolicy:
    """The default trains what the agent's own model did in calls that ended well.

    ``length`` finishes are trained: the tokens were sampled and their logprobs hold; whether an
    answer that was cut deserves its reward is the trainer's filter to decide.
    """

    kinds: frozenset[CallKind] = frozenset(
        {CallKind.MAIN, CallKind.SUBAGENT, CallKind.RETRY, CallKind.UNKNOWN}
    )
    """Sub-agents share the policy's weights; a retry is the call that went well after one that was
    cut; an unknown kind is not evidence of a side task."""
    partial: bool = False
    """Train calls that were cut: their ends are not the policy's decision."""
    finish_length: bool = True
    """Train replies that ended at the token limit."""
    parse_failed: bool = True
    """Train replies with a tool call that could not be read: the policy sampled them, and an
    unanswered call earns what it deserves."""
    constrained: bool = True
    """Train replies that a grammar shaped (a response format, a required tool). On an engine that
    masks its logits for it their logprobs are of the masked distribution: ratios to the trainer's
    own start well below 1 there."""
    models: frozenset[str] | None = None
    """Served models that are trained; ``None`` for all. A frozen model is one left out."""
    oldest_version: int | None = None
    """Tokens of earlier policy versions are stale."""
    untrusted_versions: frozenset[int] = field(default_factory=frozenset)
    """Versions whose publish was never verified, or found wrong."""

    def as_data(self) -> dict[str, Any]:
        """This policy as JSON-ready data, equal for equal policies."""
        return {
            "kinds": sorted(kind.value for kind in self.kinds),
            "partial": self.partial,
            "finish_length": self.finish_length,
            "parse_failed": self.parse_failed,
            "constrained": self.constrained,
            "models": None if self.models is None else sorted(self.models),
            "oldest_version": self.oldest_version,
            "untrusted_versions": sorted(self.untrusted_versions),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TrainablePolicy:
        """The policy of :meth:`as_data`. Raises ``TypeError`` for unknown fields."""
        values = dict(data)
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise TypeError(f"a policy has no field {name!r}; there are {', '.join(known)}")
        if "kinds" in values:
            values["kinds"] = frozenset(CallKind(kind) for kind in values["kinds"])
        if values.get("models") is not None:
            values["models"] = frozenset(values["models"])
        if "untrusted_versions" in values:
            values["untrusted_versions"] = frozenset(values["untrusted_versions"])
        return cls(**values)


DEFAULT_POLICY = TrainablePolicy()


def untrainable(policy: TrainablePolicy, call: CallRow, row: SpanRow) -> str | None:
    """Why no token of this sampled span may be trained; ``None`` when the policy allows it."""
    if row.span.start == DETACHED:
        return "prompt_unknown"
    if call.status is CallStatus.QUARANTINED:
        return "quarantined"
    if call.status is CallStatus.PARTIAL and not policy.partial:
        return "partial"
    if call.status not in (CallStatus.COMPLETE, CallStatus.PARTIAL):
        return f"status_{call.status}"
    if call.kind not in policy.kinds:
        return f"kind_{call.kind}"
    if is_frozen(call.notes):
        return "model_frozen"
    if policy.models is not None and call.model_served not in policy.models:
        return "model_frozen"
    if row.finish_reason == "length" and not policy.finish_length:
        return "finish_length"
    if not policy.parse_failed and parse_failed(call, row.choice or 0):
        return "parse_failed"
    if call.constrained and not policy.constrained:
        return "constrained"
    return None


def parse_failed(call: CallRow, choice: int = 0) -> bool:
    """Whether a reply called a tool in a way that nobody can read: arguments that are no JSON
    object, or a call that the engine's parser left in the text."""
    said = replies(call)
    if choice >= len(said):
        return False
    reply = said[choice]
    if any(mark in str(reply.get("content") or "") for mark in _CALL_MARKS):
        return True
    return not all(
        _is_object(tool_call["function"]["arguments"])
        for tool_call in reply.get("tool_calls") or ()
        if "function" in tool_call
    )


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments or "{}"), dict)
    except orjson.JSONDecodeError:
        return False


def version_reason(policy: TrainablePolicy, run: VersionRun) -> str | None:
    """Why the tokens of this policy version may not be trained."""
    if run.version in policy.untrusted_versions:
        return "version_untrusted"
    if policy.oldest_version is not None and run.version < policy.oldest_version:
        return "version_stale"
    return None
