"""Test that an agent's files are copied out of its container, and none lead out of the copy."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from bridle.harnesses.sandboxes.container.archives import extract


def hostile(outside: Path) -> bytes:
    """An archive with a file, and with entries that lie or lead elsewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:

        def add(
            name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
        ) -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, link, mode
            data = b"" if kind != tarfile.REGTYPE else b"mine"
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))

        add("./", tarfile.DIRTYPE, mode=0o755)
        add("made/", tarfile.DIRTYPE, mode=0o755)
        add("made/answer.txt", mode=0o4755)
        add("door", tarfile.SYMTYPE, str(outside))
        add("door/through.txt")
        add("../above.txt")
        add("pipe", tarfile.FIFOTYPE)
        add("hard", tarfile.LNKTYPE, "../secret")
    return buffer.getvalue()


@pytest.mark.parametrize("python", ["with filters", "before 3.11.4"])
def test_nothing_is_written_or_linked_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    outside, copy = tmp_path / "outside", tmp_path / "copy" / "workspace"
    outside.mkdir()
    copy.mkdir(parents=True)
    (tmp_path / "copy" / "secret").write_text("secret")
    if python == "before 3.11.4":
        monkeypatch.delattr(tarfile, "data_filter")
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", None, raising=False)
    with tarfile.open(fileobj=io.BytesIO(hostile(outside))) as tar:
        extract(tar, copy)

    assert (copy / "made" / "answer.txt").read_text() == "mine"
    assert (copy / "made" / "answer.txt").stat().st_mode & 0o7000 == 0
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "copy" / "above.txt").exists()
    found = {str(path.relative_to(copy)) for path in copy.rglob("*")}
    assert found == {"made", "made/answer.txt", "door", "door/through.txt"}
    assert not (copy / "door").is_symlink()
