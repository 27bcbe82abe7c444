"""The reader of what engines report of a reply's tokens beside logprobs, in the forms of vLLM.

vLLM 0.32 (``--enable-return-routed-experts``) puts ``routed_experts`` into each choice of a reply
that is not streamed: the base64 of a ``.npy`` file, ``[P + T - 1, layers, top_k]`` for ``P`` prompt
tokens and ``T`` sampled ones, of type ``uint8`` or ``uint16``. The last sampled token was never
computed. Row ``p`` is of position ``p``, from which the token after it is predicted.

``sampling_mask`` has the ids that were left by top-k, top-p and min-p, a list for each token. Of
vLLM's routes only ``/inference/v1/generate`` sends it (``--return-sampling-mask``); the embedded
engine sends both with every reply.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from bridle.proxy.wire.canonical import ChoiceReply
from bridle.store.records import KeptTokens, Note, RoutedExperts

UNREAD: Final = "routed_experts_unread"
"""Name of the note on a call whose engine sent experts that cannot be those of its tokens."""

MASK_UNREAD: Final = "sampling_mask_unread"
"""Name of the note on a call whose engine sent sets for another number of tokens."""


class ReplyExperts(NamedTuple):
    """The experts behind the tokens of a choice."""

    prompt: RoutedExperts | None = None
    """``[P', layers, top_k]``: those behind the last ``P'`` tokens of the prompt."""
    sampled: RoutedExperts | None = None
    """``[T, layers, top_k]``"""
    notes: tuple[Note, ...] = ()


class TokenFacts(NamedTuple):
    """The facts that an engine reported of a choice's tokens, beside logprobs."""

    experts: ReplyExperts
    kept: KeptTokens | None
    notes: tuple[Note, ...]


def read_facts(choice: ChoiceReply, prompt: int | None) -> TokenFacts:
    """Return the facts of a choice after a prompt of ``prompt`` tokens, if they are known.

    Facts of a long context take some milliseconds to read.
    """
    routed = None if prompt is None else choice.routed_experts
    experts = read_experts(routed, prompt or 0, len(choice.token_ids))
    kept, notes = read_kept(choice.kept, len(choice.token_ids))
    return TokenFacts(experts, kept, (*experts.notes, *notes))


def read_experts(text: str | None, prompt: int, sampled: int) -> ReplyExperts:
    """Return the experts of a choice with ``prompt`` and ``sampled`` tokens.

    An unusable ``text`` gives none, and a note.
    """
    if text is None:
        return ReplyExperts()
    try:
        with io.BytesIO(base64.b64decode(text, validate=True)) as file:
            experts = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        return ReplyExperts(notes=(Note(UNREAD, str(error)[:200]),))
    if experts.ndim != 3 or experts.dtype.kind not in "ui" or not experts[:1].size:
        found = f"{experts.dtype}{list(experts.shape)}"
        return ReplyExperts(notes=(Note(UNREAD, found),))
    before = len(experts) - sampled
    if before != prompt - 1 or not 0 <= experts.min() <= experts.max() <= _HIGHEST:
        found = f"{len(experts)} rows up to {experts.max()} for {prompt} + {sampled} tokens"
        return ReplyExperts(notes=(Note(UNREAD, found),))
    kind = np.uint8 if experts.max() <= np.iinfo(np.uint8).max else np.uint16
    experts = experts.astype(kind, copy=False)
    # Nothing stands before the first token of a prompt.
    first = np.zeros((1, *experts.shape[1:]), kind)
    return ReplyExperts(np.concatenate([first, experts[:before]]), experts[before:])


_HIGHEST: Final = int(np.iinfo(np.int16).max)


def read_kept(
    sets: Sequence[Sequence[int]], sampled: int
) -> tuple[KeptTokens | None, tuple[Note, ...]]:
    """Return the sets that a choice's tokens were drawn from, and notes.

    There are none without ``sets``, and none for another number of tokens, which is a note.
    """
    if not sets:
        return None, ()
    if len(sets) != sampled:
        return None, (Note(MASK_UNREAD, f"{len(sets)} sets for {sampled} tokens"),)
    return KeptTokens.of(sets), ()
