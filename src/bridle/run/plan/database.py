"""The database of a number of proxy processes, and what they ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bridle.store.operations.gates import REST_S
from bridle.store.schema.connections import CONNECTIONS
from bridle.store.writing.writer import LEASE_S

_RENEWAL: Final = 2
"""Transactions by which a process renews its lease, three times in the lease."""


@dataclass(frozen=True, slots=True)
class Database:
    """The load of processes on their database."""

    name: str
    """``SQLite`` for one process, else ``PostgreSQL``."""
    connections: int
    """The connections that the server needs for the processes; 0 for SQLite."""
    idle_transactions_per_s: float
    """The transactions a second of the processes while they have no calls; 0 for SQLite."""


def database(processes: int) -> Database:
    """Return the database of so many proxy processes."""
    if processes == 1:
        return Database("SQLite", 0, 0.0)
    rate = 1 / REST_S + _RENEWAL / (LEASE_S / 3)
    return Database("PostgreSQL", processes * CONNECTIONS, processes * rate)
