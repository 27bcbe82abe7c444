"""The optional dependency on pyarrow, which only Arrow tables and Parquet files need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridle.errors import BridleError
from bridle.extras import missing_extra


class ArrowMissing(BridleError):
    """Arrow or Parquet was requested, but pyarrow is not installed."""


@contextmanager
def needs_arrow() -> Iterator[None]:
    """Guard imports that need pyarrow.

    Raise :class:`ArrowMissing`, which names the extra to install.
    """
    try:
        yield
    except ImportError as error:
        raise ArrowMissing(
            missing_extra("Arrow and Parquet need an extra", "parquet", error)
        ) from error
