"""Models beside the default policy, as a command line names them."""

from __future__ import annotations

import os

from bridle.errors import UsageError
from bridle.proxy.settings import OtherModel
from bridle.run.environment import is_base_url


def other_model(text: str) -> tuple[str, OtherModel]:
    """Parse ``NAME=URL[,model=THEIRS][,key=VARIABLE][,external]``.

    Several URLs are several engines.

    Raise :class:`bridle.errors.UsageError`.
    """
    name, rest = pair(text, "--other-model")
    urls: list[str] = []
    options: dict[str, str] = {}
    external = False
    for part in rest.split(","):
        option, _, value = part.partition("=")
        if is_base_url(part):
            urls.append(part)
        elif part == "external":
            external = True
        elif option in ("model", "key") and value:
            options[option] = value
        else:
            raise UsageError(
                f"--other-model {name}: {part!r} is not a URL, model=, key= or external"
            )
    if not urls:
        raise UsageError(f"--other-model {name}: no URL")
    key = options.get("key")
    if key is not None and not os.environ.get(key):
        raise UsageError(f"--other-model {name}: the environment has no {key}")
    api_key = None if key is None else os.environ[key]
    return name, OtherModel(tuple(urls), options.get("model"), api_key, external)


def further_policy(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse ``NAME=URL[,URL…]``: a further trained policy and the engines that serve it.

    Raise :class:`bridle.errors.UsageError`.
    """
    name, rest = pair(text, "--policy")
    urls = tuple(rest.split(","))
    for url in urls:
        if not is_base_url(url):
            raise UsageError(f"--policy {name}: {url!r} is not a URL such as http://127.0.0.1:8000")
    return name, urls


def pair(text: str, option: str) -> tuple[str, str]:
    """Split ``NAME=VALUE`` into two texts.

    Raise :class:`bridle.errors.UsageError` for another form.
    """
    name, _, value = text.partition("=")
    if not name or not value:
        raise UsageError(f"{option} {text}: expected NAME=VALUE")
    return name, value
