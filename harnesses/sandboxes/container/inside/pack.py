"""Writes an archive of a file or folder of the container to standard output, within bounds.

``pack.py KIND PATH MOST`` packs the ``file`` or the content of the ``folder`` there. It applies the
rules of ``leftovers.py``, which lies beside it in the container, before it reads anything. It runs
as root, so that it reads what the agent closed to everybody.
"""

from __future__ import annotations

import os
import stat
import sys
import tarfile
from pathlib import Path

MISSING = 44
"""The exit code for a path at which there is nothing that is copied."""


def main() -> None:
    sys.path.insert(0, os.path.dirname(__file__))
    from leftovers import Left, left_in  # type: ignore[import-not-found]

    kind, path, most = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if kind == "folder" and path.is_dir() and not path.is_symlink():
        found = left_in(path, most)
    elif kind == "file" and path.is_file() and path.lstat().st_size <= most:
        found = iter([Left(str(path), path.name, None, most)])
    else:
        sys.stderr.write(f"there is no {kind} of at most {most} bytes at {str(path)!a}")
        sys.exit(MISSING)
    with tarfile.open(
        fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT, errors="surrogateescape"
    ) as archive:
        for one in found:
            add(archive, one)


def add(archive: tarfile.TarFile, one) -> None:  # type: ignore[no-untyped-def]
    """Add a link, folder or file; a file that has changed in the meantime may be left out."""
    from leftovers import opened_file

    entry = tarfile.TarInfo(one.name)
    if one.link is not None:
        entry.type, entry.linkname = tarfile.SYMTYPE, one.link
    elif one.size is None:
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    else:
        with opened_file(one.path, one.size) as opened:
            if opened is None:
                return
            data, state = opened
            entry.mode, entry.mtime = stat.S_IMODE(state.st_mode) & 0o777, int(state.st_mtime)
            entry.size = state.st_size
            archive.addfile(entry, data)
            return
    archive.addfile(entry)


if __name__ == "__main__":
    main()
