"""Arrow and Parquet belong to an extra: recording, reading and text exports do without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridle.errors import BridleError
from bridle.extras import missing_extra


class ArrowMissing(BridleError):
    """Something asked for Arrow or Parquet where pyarrow is not installed."""


@contextmanager
def needs_arrow() -> Iterator[None]:
    """Around imports that need pyarrow. Raises :class:`ArrowMissing` with what to install."""
    try:
        yield
    except ImportError as error:
        raise ArrowMissing(
            missing_extra("Arrow and Parquet need an extra", "parquet", error)
        ) from error
