"""The folder in which policies that are made or converted once are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return ``$BRIDLE_HOME/cache``, else ``bridle`` in the user's cache folder."""
    if home := os.environ.get("BRIDLE_HOME"):
        return Path(home) / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bridle"
