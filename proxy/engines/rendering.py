"""Whether an engine has been seen to render as the proxy does."""

from __future__ import annotations


class EngineRendering:
    """What the comparisons of an engine's prompts have shown
    (:mod:`bridle.proxy.engines.rendering_check`)."""

    __slots__ = ("_epoch", "agrees", "difference")

    def __init__(self) -> None:
        self.agrees = False
        """Every prompt that was compared is the one that is rendered here, and one was."""
        self.difference = ""
        """How a prompt differed; empty: none did. Calls are not continued exactly then."""
        self._epoch = 0
        """The connection epoch in which the difference was found."""

    def found(self, difference: str, epoch: int) -> None:
        """Takes up a comparison; ``difference`` is empty for equal prompts. Only an engine that
        has been connected to anew, and may have been started otherwise, is believed again."""
        if difference:
            self.difference, self.agrees, self._epoch = difference, False, epoch
        elif not self.difference or epoch != self._epoch:
            self.difference, self.agrees = "", True
