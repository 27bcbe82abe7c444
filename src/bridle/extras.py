"""The packages that only some commands need, and the command that installs them.

Only :func:`install_command` writes the ``pip install`` of an extra. The distribution is
``bridle-rl``; the package index has an unrelated ``bridle``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from typing import Final
from urllib.parse import unquote, urlsplit

from bridle.errors import BridleError

DISTRIBUTION: Final = "bridle-rl"


class MissingExtra(BridleError):
    """A command needs packages that are not installed; the message names what installs them."""

    def __init__(self, what: str, extra: str, detail: str) -> None:
        super().__init__(missing_extra(what, extra, detail))


def missing_extra(what: str, extra: str, detail: object) -> str:
    """Return the message about a missing package.

    It has ``what``, which names the need, the command that installs ``extra``, and in parentheses
    ``detail``, the import that failed.
    """
    return f"{what}: {install_command(extra)} ({detail})"


def install_command(extra: str) -> str:
    """Return the ``pip install`` command that adds ``extra`` to this installation.

    An installation from a folder (PEP 610's ``direct_url.json``) is extended from that folder,
    because the index may not have its version.
    """
    try:
        origin = json.loads(
            metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
        )
    except metadata.PackageNotFoundError:
        origin = {}
    folder = origin.get("dir_info")
    if folder is None:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    editable = "-e " if folder.get("editable") else ""
    return f"pip install {editable}'{unquote(urlsplit(origin['url']).path)}[{extra}]'"


def require(module: str, extra: str, what: str) -> None:
    """Raise :class:`MissingExtra` if ``module`` is not installed.

    Its message begins with ``what``.
    """
    if find_spec(module) is None:
        raise MissingExtra(what, extra, f"there is no module {module}")


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Raise :class:`MissingExtra` if an import in the context fails.

    Its message begins with ``what``.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(what, extra, str(error)) from error
