"""Recorded calls as a verified token tree, as training samples and as exported files; the audit.

``session`` loads a session for everyone who reads one; :func:`open_store` is the entry for
programs: sessions, calls, trees and samples as typed objects and as tables.
"""

from bridle.reconstruct.dataset import RecordedSession, RecordedStore, open_store

__all__ = ["RecordedSession", "RecordedStore", "open_store"]
