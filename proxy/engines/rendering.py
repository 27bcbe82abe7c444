"""A record of whether an engine renders prompts as the proxy does."""

from __future__ import annotations


class EngineRendering:
    """The results of comparing an engine's prompts with the local rendering
    (:mod:`bridle.proxy.engines.rendering_check`)."""

    __slots__ = ("_epoch", "agrees", "difference")

    def __init__(self) -> None:
        self.agrees = False
        """True if at least one prompt was compared and every compared prompt equals the local
        rendering."""
        self.difference = ""
        """A description of how a prompt differed; empty if none did. Calls are not continued
        exactly while it is set."""
        self._epoch = 0
        """The connection epoch in which the difference was found."""

    def found(self, difference: str, epoch: int) -> None:
        """Record a comparison; ``difference`` is empty if the prompts are equal. After a
        difference, equal prompts count only in another connection epoch: the engine may have been
        restarted with other settings."""
        if difference:
            self.difference, self.agrees, self._epoch = difference, False, epoch
        elif not self.difference or epoch != self._epoch:
            self.difference, self.agrees = "", True
