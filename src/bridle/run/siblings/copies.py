"""A copy of a folder that a command sees under the folder's own path."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bridle.harnesses.sandboxes.walls import missing
from bridle.run.siblings.recording import NotReentrant


def why_no_copies(folder: Path) -> str | None:
    """Return the reason why commands cannot have copies of ``folder``, or ``None`` if they can."""
    if folder in (Path("/"), Path.home()):
        return f"{folder} is too large to be copied"
    return missing()


@contextlib.contextmanager
def copied(folder: Path, commit: str | None = None) -> Iterator[list[str]]:
    """Copy ``folder``, and yield the words before a command that sees the copy in its place.

    With a ``commit``, the copy is reset to it; files that Git ignores stay. Raise
    :class:`NotReentrant` if that fails. The copy is deleted afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="bridle-copy-", ignore_cleanup_errors=True) as parent:
        copy = Path(parent, folder.name)
        _run(["cp", "-a", "--reflink=auto", str(folder), str(copy)])
        if commit is not None:
            _run(["git", "-C", str(copy), "checkout", "--quiet", "--force", commit])
            _run(["git", "-C", str(copy), "clean", "--quiet", "--force", "-d"])
        own = ("--bind", str(copy), str(folder), "--chdir", str(folder))
        yield ["bwrap", "--die-with-parent", "--dev-bind", "/", "/", *own, "--"]


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReentrant(f"`{' '.join(argv)}` failed: {done.stderr.strip()[-300:]}")
