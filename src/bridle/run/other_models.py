"""The addresses and keys of the models beside a proxy's default policy."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

from bridle.errors import UsageError
from bridle.proxy.settings import OtherModel, OtherRoute, ProxyConfig
from bridle.run.environment import is_base_url

Other = TypeVar("Other", OtherModel, OtherRoute)


def require_urls(config: ProxyConfig) -> None:
    """Raise :class:`bridle.errors.UsageError` for an engine whose address is not a URL."""
    named = {f"policies.{name}": urls for name, urls in config.policies.items()}
    named |= {f"other_models.{name}": one.urls for name, one in config.other_models.items()}
    named |= {f"routes.{name}": (one.url,) for name, one in config.routes.items()}
    for name, urls in named.items():
        if not urls:
            raise UsageError(f"{name} has no URL")
        for url in urls:
            if not is_base_url(url):
                raise UsageError(f"{name}: {url!r} is not a URL such as http://127.0.0.1:8000")


def with_key(name: str, other: Other) -> Other:
    """Return the model or route of the setting ``name`` with its key from the environment.

    Raise :class:`bridle.errors.UsageError` if the environment does not have the key.
    """
    if other.key_variable is None:
        return other
    if not (key := os.environ.get(other.key_variable)):
        raise UsageError(f"{name}: the environment has no {other.key_variable}")
    return replace(other, api_key=key)
