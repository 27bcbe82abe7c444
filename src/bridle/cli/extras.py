"""Packages that only some commands need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from bridle.errors import BridleError


class MissingExtra(BridleError):
    """A command needs packages that are not installed; the message names what installs them."""

    def __init__(self, what: str, extra: str, detail: str) -> None:
        super().__init__(f"{what}: pip install 'bridle-rl[{extra}]' ({detail})")


def require(module: str, extra: str, what: str) -> None:
    """Raises :class:`MissingExtra` when ``module`` is not installed; ``what`` needs it."""
    if find_spec(module) is None:
        raise MissingExtra(what, extra, f"there is no module {module}")


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Around imports: raises :class:`MissingExtra` for one that fails. ``what`` needs them."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(what, extra, str(error)) from error
