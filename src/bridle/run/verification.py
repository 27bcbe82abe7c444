"""Verify that an engine still gives recorded sessions the logprobs that they were recorded with.

The recorded ids of each sample go to the engine, which scores them. Its logprobs are compared with
the recorded ones, and its texts of the ids with the vocabulary in the store. A control changes one
id and must change the logprobs behind it; without that, equal numbers would prove nothing.

The check does not see a chat template that changed, because ids are sent and nothing is rendered,
nor a sampler that changed, because nothing is drawn. Tokens that were not drawn from the policy's
own distribution are left out, as in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.client import EngineClient
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.rules import DEFAULT_RULES
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.session import LoadedSession
from bridle.store.errors import NotFound
from bridle.store.reading.queries import Reader
from bridle.store.records import PLAIN

TOLERANCE = 1e-3
"""The largest mean difference, in nats a token, that float32 explains. In bfloat16 it is 0.1."""
_TEXTS_DIFFER = 0.01
"""Share of the ids with another text from which on the tokenizer is another one."""


@dataclass(frozen=True, slots=True)
class VerifiedSession:
    """The comparison of a session's recorded logprobs with those of an engine."""

    session_id: str
    versions: tuple[int, ...]
    """The policy versions that sampled it."""
    tokens: int
    """Number of sampled tokens that were compared."""
    gap: float
    """Mean absolute difference of the logprobs, in nats."""
    largest: float
    """Largest absolute difference."""
    texts: int
    """Number of distinct ids whose texts were compared."""
    other_texts: tuple[tuple[int, str, str], ...]
    """Ids with another text: the id, the recorded text and the engine's."""
    control: float | None
    """Mean absolute change of the engine's own logprobs behind a changed id; ``None`` if no token
    follows one."""

    def verdict(self, tolerance: float = TOLERANCE) -> str:
        """Return ``ok``, or what was found in a few words."""
        if self.texts and len(self.other_texts) / self.texts > _TEXTS_DIFFER:
            return "another tokenizer"
        if not self.tokens:
            return "nothing to compare"
        if self.control is not None and not self.control > tolerance:
            return "no verdict: a changed id changes nothing"
        return "ok" if self.gap <= tolerance else "other weights"


def verify(
    reader: Reader, engine: EngineClient, sessions: Iterable[LoadedSession]
) -> Iterator[VerifiedSession]:
    """Yield the comparison for each session.

    Raise :class:`bridle.engine.contract.client.EngineError` if the engine does not score.
    """
    for session in sessions:
        yield _verified(reader, engine, session)


def _verified(reader: Reader, engine: EngineClient, session: LoadedSession) -> VerifiedSession:
    samples = [one for one in build(session, DEFAULT_RULES).samples if len(one.token_ids) > 1]
    differences: list[NDArray[np.float64]] = []
    texts: dict[int, str] = {}
    control = None
    for sample in samples:
        scored, own = engine.score_with_texts(sample.token_ids.tolist())
        texts |= own
        at = np.flatnonzero(_comparable(sample)[1:])
        differences.append(np.abs(sample.logprobs[1:][at].astype(np.float64) - scored[at]))
        if control is None:
            control = _control(engine, sample, scored)
    found = np.concatenate(differences) if differences else np.zeros(0)
    compared, others = _compared(reader, session, texts)
    versions = {int(one) for sample in samples for one in sample.versions[sample.mask]}
    return VerifiedSession(
        session.id,
        tuple(sorted(versions)),
        len(found),
        float(found.mean()) if len(found) else 0.0,
        float(found.max()) if len(found) else 0.0,
        compared,
        others,
        control,
    )


def _comparable(sample: Sample) -> NDArray[np.bool_]:
    """Return where a recorded logprob is of the distribution that engines score by: ``bool[T]``.

    That is the policy's own, before temperature and truncation.
    """
    plain = np.array(
        [
            one is not None and (one.logprobs == "raw" or one.label == PLAIN.label)
            for one in sample.samplers
        ]
        + [False]
    )
    comparable: NDArray[np.bool_] = sample.mask & plain[sample.calls]
    return comparable


def _control(engine: EngineClient, sample: Sample, scored: NDArray[np.float32]) -> float | None:
    """Return how much the logprobs behind an id change if the id is another one."""
    ids = sample.token_ids.tolist()
    at = len(ids) // 2
    if at + 1 >= len(ids):
        return None
    ids[at] = next((one for one in ids if one != ids[at]), ids[at])
    changed = engine.score(ids)
    return float(np.abs(changed[at:].astype(np.float64) - scored[at:]).mean())


def _compared(
    reader: Reader, session: LoadedSession, texts: dict[int, str]
) -> tuple[int, tuple[tuple[int, str, str], ...]]:
    """Compare the engine's texts of ids with those of the session's vocabulary.

    Ids whose bytes are a part of a character have no text of their own, and are left out.
    """
    digest = session.record.vocabulary
    try:
        pieces = [] if digest is None else reader.vocabulary(digest)
    except (NotFound, ValueError):
        return 0, ()
    known: dict[int, str] = {}
    for token in texts:
        try:
            known[token] = pieces[token].decode() if token < len(pieces) else ""
        except UnicodeDecodeError:
            continue
    if not pieces:
        return 0, ()
    others = tuple(
        (token, text, texts[token])
        for token, text in known.items()
        if text.strip() != texts[token].strip() and "\N{REPLACEMENT CHARACTER}" not in texts[token]
    )
    return len(known), others
