"""What can go wrong between a record and the disk."""

from __future__ import annotations

from bridle.errors import BridleError


class StoreUnavailable(BridleError):
    """The record is not in the store: its transaction failed, or was never tried; or what is asked
    for cannot be read."""


class StoreBusy(StoreUnavailable):
    """The writer's queue is full; nothing was queued. Try again, or turn the client away."""

    retryable = True


class StoreClosed(StoreUnavailable):
    """The writer is not running."""


class RecordRejected(StoreUnavailable):
    """The database is well, but it does not take this record (a duplicate, an unknown session)."""


class NotFound(BridleError, LookupError):
    """No such session, call or body in the store."""
