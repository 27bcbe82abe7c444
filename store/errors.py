"""Errors between a record and the disk."""

from __future__ import annotations

from bridle.errors import BridleError


class StoreUnavailable(BridleError):
    """A record is not in the store, or data of the store cannot be read.

    The record's transaction failed or was never tried.
    """


class StoreBusy(StoreUnavailable):
    """The writer's queue is full and nothing was queued.

    Try again, or refuse the client's request.
    """

    retryable = True


class StoreClosed(StoreUnavailable):
    """The writer is not running."""


class RecordRejected(StoreUnavailable):
    """The database works, but it refuses this record (a duplicate, an unknown session)."""


class NotFound(BridleError, LookupError):
    """The store has no such session, call or body."""
