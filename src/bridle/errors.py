"""The base classes of every error that Bridle raises on purpose.

Each room defines its own subclasses next to the code that raises them. The command line prints the
message of any of them as one line and exits with :attr:`BridleError.exit_code`.
"""

from __future__ import annotations


class BridleError(Exception):
    """An error whose message states what happened and what to do about it."""

    retryable: bool = False
    """True if the same request may succeed when it is made again."""
    exit_code: int = 1
    """The exit status of a command that this error ends."""


class UsageError(BridleError):
    """The caller asked for something that does not exist or is malformed; nothing was started."""

    exit_code = 2
