"""Recorded calls to a lineage-checked token tree to samples; audit and exports.

:func:`open_store` is the way in for programs: sessions, calls, trees and samples as typed objects
and as tables.
"""

from bridle.reconstruct.dataset import RecordedSession, RecordedStore, open_store

__all__ = ["RecordedSession", "RecordedStore", "open_store"]
