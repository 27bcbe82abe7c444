"""The store's ``metrics`` table."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bridle.store.writing.writer import Writer


class StoreSink:
    """The rows of one run. The store's writer stays the caller's."""

    def __init__(self, writer: Writer, run_id: str) -> None:
        self._writer = writer
        self._run_id = run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # SQL has no portable NaN or infinity; TensorBoard shows them.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._writer.record_metrics(self._run_id, step, finite)

    def close(self) -> None:
        """Nothing to do: every write is committed."""
