"""Defaults that come from the environment: folders, addresses, keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

EngineKind = Literal["embedded", "vllm"]
DemoPolicy = Literal["smollm2", "tiny"]
"""``smollm2``: SmolLM2-135M-Instruct, as it was published. ``tiny``: random weights, warm-started
on a scripted teacher; they call tools."""
DEFAULT_PORT = 8484
ADMIN_KEY_VARIABLE = "BRIDLE_ADMIN_KEY"
"""The key that opens the proxy's control routes."""
UPSTREAM_KEY_VARIABLE = "BRIDLE_UPSTREAM_API_KEY"
"""The key that the proxy sends to its engines."""
API_KEY_VARIABLE = "BRIDLE_ENGINE_API_KEY"
"""The key that our embedded engine asks for, where it asks for one."""
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
"""The key that a vLLM started here asks for; vLLM's own."""


def data_home() -> Path:
    """Bridle's folder for the user's recordings: ``$BRIDLE_HOME``, else the XDG data folder."""
    if home := os.environ.get("BRIDLE_HOME"):
        return Path(home)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "bridle"


def default_store() -> str:
    """``$BRIDLE_STORE`` (a path or a database URL), else ``bridle.db`` in the data folder."""
    return os.environ.get("BRIDLE_STORE") or str(data_home() / "bridle.db")


def default_proxy() -> str:
    """``$BRIDLE_PROXY``, else the address that ``bridle proxy`` listens on by default."""
    return os.environ.get("BRIDLE_PROXY") or f"http://127.0.0.1:{DEFAULT_PORT}"


def key_in(variable: str) -> str | None:
    """The key that an environment variable holds; an empty one is none, and opens nothing."""
    return os.environ.get(variable) or None


def is_base_url(text: str) -> bool:
    """Whether ``text`` is an HTTP URL with a host."""
    try:
        url = urlsplit(text)
        _ = url.port  # raises for a port that is not a number
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)
