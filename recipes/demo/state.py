"""The state of a demo run, from which a second start continues after the finished stages."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any, Final

import orjson

from bridle.errors import UsageError

STATE_FILE: Final = "state.json"


def start_afresh(root: Path) -> None:
    """Delete the run in ``root``. Raise ``OSError`` if there is no run but other files."""
    if not (root / STATE_FILE).exists():
        if root.exists() and any(root.iterdir()):
            raise OSError(errno.ENOTEMPTY, "no run to start afresh, but other files", str(root))
        return
    shutil.rmtree(root)


class DemoState:
    """The file ``state.json``: the finished stages and the seconds that each took.

    It is written after each stage.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / STATE_FILE
        self.values: dict[str, Any] = {"done": [], "runs": {}, "seconds": {}}
        if self._path.exists():
            self.values = orjson.loads(self._path.read_bytes())

    @property
    def runs(self) -> dict[str, str]:
        """The run ids in the store, by stage."""
        runs: dict[str, str] = self.values["runs"]
        return runs

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds spent so far, by stage, over all attempts."""
        seconds: dict[str, float] = self.values["seconds"]
        return seconds

    def require_policy(self, policy: str) -> None:
        """Raise :class:`bridle.errors.UsageError` if the run trains another policy."""
        known = self.values.setdefault("policy", policy)
        if known != policy:
            raise UsageError(
                f"{self._path.parent} holds a run of the policy {known}: --policy {known} goes on "
                "with it, --fresh deletes it"
            )

    def is_done(self, stage: str) -> bool:
        return stage in self.values["done"]

    def finish(self, stage: str) -> None:
        self.values["done"].append(stage)
        self.save()

    def spend(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.save()

    def save(self) -> None:
        partial = self._path.with_suffix(".tmp")
        partial.write_bytes(orjson.dumps(self.values, option=orjson.OPT_INDENT_2))
        partial.replace(self._path)
