"""The stores behind one feed: the proxy's own, and those of other deployments.

A session is in one of them, and so are its leases. The id of a lease names its store, so that it is
acknowledged there, whichever order of stores a proxy was started with.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from bridle.store.errors import StoreUnavailable
from bridle.store.operations.leases import Lease, Leases, UnknownLease
from bridle.store.reading.queries import Reader

log = logging.getLogger("bridle.proxy")


class Held(NamedTuple):
    """Sessions that are leased from one of the stores."""

    reader: Reader
    """The reader of the sessions' store."""
    id: str
    """The id of the lease, for clients."""
    sessions: tuple[str, ...]


class FeedStores:
    """The stores of a feed; ``own`` is the proxy's."""

    def __init__(self, own: Reader, others: Sequence[Reader] = ()) -> None:
        self._readers = {"": own, **{_prefix(reader): reader for reader in others}}

    def lease(self, take: Callable[[Reader, Leases], Lease | None]) -> Held | None:
        """Lease sessions from the first store that has any; they are asked in random order.

        ``take`` leases from one store. A store that is away is left out. Return ``None`` if there
        are no sessions; raise :class:`StoreUnavailable` if a store is away and no other has any.
        """
        away: StoreUnavailable | None = None
        for prefix, reader in random.sample(list(self._readers.items()), len(self._readers)):
            try:
                found = take(reader, Leases(reader.engine))
            except StoreUnavailable as error:
                log.warning("feed_store_not_read", extra={"error": str(error)})
                away = error
                continue
            if found is not None:
                return Held(reader, prefix + found.id, found.sessions)
        if away is not None:
            raise away
        return None

    def leases(self, lease_id: str) -> tuple[Leases, str]:
        """Return the leases of the store that a lease is in, and its id there.

        Raise :class:`UnknownLease` if the store is not behind this feed.
        """
        prefix, dot, own_id = lease_id.rpartition(".")
        reader = self._readers.get(prefix + dot)
        if reader is None:
            raise UnknownLease(f"lease {lease_id!r} is in a store that is not behind this feed")
        return Leases(reader.engine), own_id


def _prefix(reader: Reader) -> str:
    """Return the beginning of the ids of a store's leases, which a new password does not change."""
    url = reader.engine.url.set(password=None).render_as_string()
    return f"{blake2b(url.encode(), digest_size=6).hexdigest()}."
