"""Contexts: text that a teacher's prompt holds and the policy's did not.

The policy's prompt and tokens stay as they were recorded. For the teacher alone, a context is put
into each of a session's branches at one place before the first trained token; see
:attr:`bridle.trainer.config.DistillationConfig.place`. The scores of the inserted tokens are taken
out again, so that every remaining score belongs to the token at its index.

=================  ==============================================================================
``outcome``        the reward that the session earned
``hint``           a field of its task's payload
``demonstration``  the messages of the group's best session, if it is better than the group's worst
                   and no worse than the taught one
=================  ==============================================================================

A session for which there is no context, or whose prompt lacks the place, is not taught.

Sources: Skill-SD, arXiv 2604.10674 (a teacher that alone sees what earlier sessions showed);
Self-Distillation, arXiv 2601.19897 (a demonstration); TT-OPD (the outcome, and a moving average as
the teacher); Agent-RLVR, arXiv 2506.11425 (kinds of hints, which there the agent itself gets).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.errors import UsageError
from bridle.reconstruct.samples.sample import Episode, Sample
from bridle.registry import Registry
from bridle.trainer.config import ContextPlace, DistillationConfig


@dataclass(frozen=True, slots=True)
class Attempt:
    """A session that is taught, and the facts of which its context may be made.

    The payload of its task is ``episode.payload``.
    """

    episode: Episode
    reward: float
    """The number by which the session is compared with others."""
    siblings: tuple[Attempt, ...] = ()
    """The other sessions of its group that have a reward, without siblings of their own."""


Context = Callable[[Attempt], str | Sequence[int] | None]
"""A function that returns the text or the token ids to insert, or ``None`` if there is nothing."""
CONTEXTS: Final[Registry[Context]] = Registry("context", "bridle.contexts")


@CONTEXTS.registered("outcome")
def outcome(attempt: Attempt) -> str:
    """Return a sentence with the session's reward."""
    return f"\nThe reward of this attempt is {attempt.reward:g}."


@dataclass(frozen=True, slots=True)
class HintOptions:
    field: str = "hint"
    """The field of the task's payload that has the hint."""


_HINT: Final = HintOptions()


@CONTEXTS.registered("hint")
def hint(attempt: Attempt, options: HintOptions = _HINT) -> str | None:
    """Return a field of the task's payload, or ``None`` if the payload lacks it."""
    stated = attempt.episode.payload.get(options.field)
    return None if stated is None else f"\n{stated}"


@CONTEXTS.registered("demonstration")
def demonstration(attempt: Attempt) -> str | None:
    """Return the messages of the group's best other session.

    Return ``None`` if it is worse than the attempt, no better than the worst of the group, or has
    no recorded messages.
    """
    best = max(attempt.siblings, key=lambda one: one.reward, default=attempt)
    worst = min(one.reward for one in (attempt, *attempt.siblings))
    lines = list(_messages(best.episode))
    if best.reward < attempt.reward or best.reward <= worst or not lines:
        return None
    return "\n".join(["\nA successful attempt:", *lines])


def _messages(episode: Episode) -> Iterator[str]:
    """Yield the replies of a session and the observations between them, a line for each."""
    for number, turn in enumerate(episode.turns):
        if turn.reply is None:
            continue
        for message in (*(turn.messages if number else ()), turn.reply):
            if message.role != "assistant" or message is turn.reply:
                calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
                yield " ".join([f"{message.role}:", *_texts(message.content), *calls])


def _texts(content: str | list[dict[str, Any]] | None) -> list[str]:
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return [part["text"] for part in parts if part.get("text")]


class Insertion(NamedTuple):
    """Token ids that a teacher's prompt has before the policy's token ``at``."""

    at: int = 0
    token_ids: tuple[int, ...] = ()

    def into(self, sample: Sample) -> Sample:
        """Return the sample as the teacher sees it; inserted tokens are not trained."""
        fills = {"token_ids": self.token_ids, "mask": 0, "logprobs": 0, "versions": -1, "calls": -1}
        arrays: dict[str, Any] = {name: getattr(sample, name) for name in fills}
        count = len(self.token_ids)
        new = {name: np.full(count, fills[name], one.dtype) for name, one in arrays.items()}
        widened: dict[str, Any] = {
            name: np.insert(one, self.at, new[name]) for name, one in arrays.items()
        }
        return replace(sample, **widened)

    def out_of(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the values of the sample's own tokens, ``float32[T]``."""
        return np.delete(values, slice(self.at, self.at + len(self.token_ids)))


Inform = Callable[[Attempt], Sequence[Insertion] | None]
"""A function that returns an insertion for each of a session's samples, or ``None`` if it is not to
be taught."""


def plain(attempt: Attempt) -> Sequence[Insertion]:
    """Insert nothing: the teacher sees what the policy saw."""
    return [Insertion()] * len(attempt.episode.samples)


class Informer:
    """The insertion of the configured context into the prompts of one policy's sessions.

    Raise :class:`bridle.errors.UsageError` if the chat template does not show where the place is.
    """

    def __init__(self, config: DistillationConfig, tokenizer: Tokenizer) -> None:
        self._context = CONTEXTS.configured(config.context, config.options)
        self._name = config.context
        self._last = config.place == "user"
        self._tokenizer = tokenizer
        self._mark = mark_of(tokenizer, config.place)
        self._pieces = [_bare(piece) for piece in tokenizer.vocabulary()]

    def __call__(self, attempt: Attempt) -> Sequence[Insertion] | None:
        ids = self._ids(self._context(attempt))
        if not ids:
            return None
        found = [self._insertion(sample, ids) for sample in attempt.episode.samples]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else None

    def _ids(self, given: object) -> tuple[int, ...]:
        """Return the token ids of what a context function returned."""
        size = self._tokenizer.vocabulary_size
        try:
            found = self._tokenizer.encode(given) if isinstance(given, str) else given
            ids = tuple(map(operator.index, cast(Sequence[int], () if found is None else found)))
        except TypeError:
            ids = (-1,)
        if not all(0 <= each < size for each in ids):
            raise UsageError(
                f"distillation.context: {self._name!r} returned {given!r:.80}, which is no text: "
                f"return text, ids of the policy's tokenizer (0 to {size - 1}), or None"
            )
        return ids

    def _insertion(self, sample: Sample, ids: tuple[int, ...]) -> Insertion | None:
        trained = np.flatnonzero(sample.mask)
        if not len(trained):
            return Insertion()
        prompt = sample.token_ids[: trained[0]].tolist()
        pieces = [self._pieces[each] if each < len(self._pieces) else b"" for each in prompt]
        text = b"".join(pieces)
        begins = text.rfind(self._mark) if self._last else text.find(self._mark)
        ends = list(accumulate(map(len, pieces), initial=0))
        if begins < 0 or begins not in ends:
            return None
        # Blank tokens before the mark belong to the message.
        return Insertion(max(at for at, end in enumerate(ends) if end == begins), ids)


_TURNS: Final = {"system": ("system", "user"), "user": ("user", "assistant", "user")}
_SENTINEL: Final = "qsentinelq"
"""The text of messages whose surroundings in the rendering are read."""


def mark_of(tokenizer: Tokenizer, place: ContextPlace) -> bytes:
    """Return the markup, without blanks, that follows the place in the policy's prompts.

    Raise :class:`bridle.errors.UsageError` if its chat template has none.
    """
    turns = [{"role": role, "content": _SENTINEL} for role in _TURNS[place]]
    mark, reason = b"", "no markup ends it"
    try:
        around = _bare(tokenizer.render(turns).encode()).split(_SENTINEL.encode())
    except TemplateError as error:
        around, reason = [], str(error)
    if len(around) == len(turns) + 1:
        # A reply in the history may begin otherwise than the one that is asked for.
        other_end = around[-1] if place == "user" else around[1]
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(around[1], other_end, strict=False))
        mark = bytes(one for one, _ in pairs)
    if not mark:
        other = "user" if place == "system" else "system"
        raise UsageError(
            f"distillation.place: the policy's chat template does not show where a {place} message "
            f"ends ({reason}): try distillation.place={other}"
        )
    return mark


def _bare(text: bytes) -> bytes:
    return b"".join(text.split())
