"""The environment variables that hold keys, and environments without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ADMIN_KEY_VARIABLE: Final = "BRIDLE_ADMIN_KEY"
"""The key that opens the proxy's control routes."""
UPSTREAM_KEY_VARIABLE: Final = "BRIDLE_UPSTREAM_API_KEY"
"""The key that the proxy sends to its engines."""
API_KEY_VARIABLE: Final = "BRIDLE_ENGINE_API_KEY"
"""The key that our embedded engine asks for, where it asks for one."""
VLLM_KEY_VARIABLE: Final = "VLLM_API_KEY"
"""The key that a vLLM started here asks for; the variable is vLLM's own."""
KEYS: Final = (ADMIN_KEY_VARIABLE, UPSTREAM_KEY_VARIABLE, API_KEY_VARIABLE, VLLM_KEY_VARIABLE)


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without keys. The names of files that hold one stay."""
    return {name: value for name, value in environment.items() if name not in KEYS}
