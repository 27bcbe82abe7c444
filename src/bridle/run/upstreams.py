"""Models beside the policy, as the command line names them."""

from __future__ import annotations

import os

from bridle.cli.options import is_base_url
from bridle.cli.terminal import fail
from bridle.proxy.settings import OtherModel


def other_model(text: str) -> tuple[str, OtherModel]:
    """``NAME=URL[,model=THEIRS][,key=VARIABLE][,external]``; several engines as several URLs.

    Exits with what is wrong with ``text``.
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
            fail(f"--other-model {name}: {part!r} is neither a URL, model=, key= nor external", 2)
    if not urls:
        fail(f"--other-model {name}: no URL", 2)
    key = options.get("key")
    if key is not None and not os.environ.get(key):
        fail(f"--other-model {name}: the environment has no {key}", 2)
    api_key = None if key is None else os.environ[key]
    return name, OtherModel(tuple(urls), options.get("model"), api_key, external)


def pair(text: str, option: str) -> tuple[str, str]:
    """``NAME=VALUE``; exits when it is not."""
    name, _, value = text.partition("=")
    if not name or not value:
        fail(f"{option} {text}: expected NAME=VALUE", 2)
    return name, value
