"""A run in the store: its metrics, its account of tokens, and the scores of trained ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bridle.store.trained import SessionFates
from bridle.store.writing.writer import Writer
from bridle.trainer.batch.fates import StepFates


class StoreSink:
    """The rows of one run in the store. The writer stays the caller's to close."""

    def __init__(self, writer: Writer, run_id: str) -> None:
        self._writer = writer
        self._run_id = run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # SQL has no portable NaN or infinity; TensorBoard shows them.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._writer.record_metrics(self._run_id, step, finite)

    def account(self, fates: Sequence[StepFates]) -> None:
        """Record where the tokens of durable steps went.

        Recording the same fates again changes nothing.
        """
        self._writer.add_sync(
            *(
                SessionFates(
                    session_id=each.session_id,
                    run_id=self._run_id,
                    tokens=each.tokens,
                    step=each.step,
                    version=each.version,
                    at=each.at,
                    scores=each.scores,
                )
                for each in fates
            )
        )

    def close(self) -> None:
        """Do nothing, because every write is committed."""
