"""``bridle ablate``: the yield and the cost of each builder on the same recorded sessions.

``tree`` is counted as this trainer runs it: a session's forest in one packed row, shared prefixes
once. ``merged`` and ``per_call`` are counted as their trainers run them: a row per sample, rows
padded to the longest of their batch. The linear part of the compute is 6 floating-point operations
per parameter and token (forward 2, backward 4; Kaplan et al. 2020, section 2.1), padding included;
attention is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from bridle.reconstruct.samples.builders import BUILDERS, build
from bridle.reconstruct.samples.rules import DEFAULT_RULES, SampleRules
from bridle.reconstruct.samples.sample import Sample
from bridle.reconstruct.session import LoadedSession
from bridle.reconstruct.tree import BrokenTree
from bridle.store.reading.queries import Reader

PACKED: Final = "tree"
FLOPS_PER_PARAMETER_TOKEN: Final = 6


@dataclass(slots=True)
class BuilderCount:
    """One builder over all sessions."""

    samples: int = 0
    rows: int = 0
    """Rows of a batch: samples, or packed sessions."""
    tokens_trained: int = 0
    tokens_in_samples: int = 0
    """The lengths of all samples, shared prefixes counted each time."""
    tokens_unique: int = 0
    """The same, with every shared prefix counted once."""
    tokens_repeated: int = 0
    """Prefix tokens that run through the model in more than one row: 0 when packed."""
    padding: int = 0

    def add(self, samples: Sequence[Sample], unique: int, *, packed: bool) -> None:
        """Count one session, without padding."""
        total = sum(len(sample.token_ids) for sample in samples)
        self.samples += len(samples)
        self.rows += bool(samples) if packed else len(samples)
        self.tokens_trained += sum(int(np.count_nonzero(sample.mask)) for sample in samples)
        self.tokens_in_samples += total
        self.tokens_unique += unique
        self.tokens_repeated += 0 if packed else total - unique

    @property
    def tokens_processed(self) -> int:
        """Tokens that one pass over the data runs through the model."""
        return self.tokens_unique + self.tokens_repeated + self.padding


@dataclass(slots=True)
class Ablation:
    """All builders over the same sessions."""

    rows_per_update: int
    builders: dict[str, BuilderCount] = field(
        default_factory=lambda: {name: BuilderCount() for name in BUILDERS}
    )
    sessions: int = 0
    calls: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    """Calls that continue another in meaning but not in tokens, by reason."""
    left_out: Counter[str] = field(default_factory=Counter)

    def as_data(self, parameters: float | None = None) -> dict[str, Any]:
        """Return JSON-ready data.

        ``flops`` is ``None`` unless ``parameters``, the model's number of parameters, is given.
        """
        return {
            "sessions": self.sessions,
            "calls": self.calls,
            "breaks": dict(self.breaks.most_common()),
            "left_out": dict(self.left_out),
            "rows_per_update": self.rows_per_update,
            "builders": {name: self._row(n, parameters) for name, n in self.builders.items()},
        }

    def _row(self, count: BuilderCount, parameters: float | None) -> dict[str, Any]:
        packed, processed = self.builders[PACKED].tokens_processed, count.tokens_processed
        flops = FLOPS_PER_PARAMETER_TOKEN * processed
        return asdict(count) | {
            "tokens_processed": processed,
            "updates": math.ceil(count.rows / self.rows_per_update),
            "compute_against_tree": processed / packed if packed else None,
            "flops": None if parameters is None else flops * parameters,
        }


def ablate(
    reader: Reader,
    rules: SampleRules = DEFAULT_RULES,
    *,
    batch_rows: int = 8,
    rows_per_update: int = 32,
    **filters: Any,
) -> Ablation:
    """Count every builder over the sessions that match the ``filters`` of ``Reader.sessions``."""
    result = Ablation(rows_per_update)
    lengths: dict[str, list[int]] = {name: [] for name in BUILDERS if name != PACKED}
    for session in LoadedSession.stream(reader, reader.sessions(**filters)):
        try:
            built = {name: build(session, rules, name).samples for name in BUILDERS}
        except BrokenTree:
            result.left_out["session_broken"] += 1
            continue
        result.sessions += 1
        result.calls += len(session.calls)
        result.breaks.update(call.break_reason for call in session.calls if call.break_reason)
        for name, samples in built.items():
            result.builders[name].add(samples, unique_tokens(samples), packed=name == PACKED)
            if name != PACKED:
                lengths[name] += [len(sample.token_ids) for sample in samples]
    for name, rows in lengths.items():
        batches = (rows[at : at + batch_rows] for at in range(0, len(rows), batch_rows))
        result.builders[name].padding = sum(max(b) * len(b) - sum(b) for b in batches)
    return result


def unique_tokens(samples: Sequence[Sample]) -> int:
    """Return the number of tokens if every prefix that samples share is counted once."""
    unique, before = 0, np.empty(0, dtype=np.uint32)
    for ids in sorted((s.token_ids for s in samples), key=lambda ids: ids.astype(">u4").tobytes()):
        shared = min(len(before), len(ids))
        differing = np.flatnonzero(before[:shared] != ids[:shared])
        unique += len(ids) - (int(differing[0]) if len(differing) else shared)
        before = ids
    return unique
