"""A key may be in a file whose name the environment gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.keys import ADMIN_KEY_VARIABLE
from bridle.run.environment import key_in


def test_a_key_in_a_file_is_taken_where_the_variable_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text("from a file\n")
    monkeypatch.delenv(ADMIN_KEY_VARIABLE, raising=False)
    monkeypatch.setenv(f"{ADMIN_KEY_VARIABLE}_FILE", str(path))
    assert key_in(ADMIN_KEY_VARIABLE) == "from a file"
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "set")
    assert key_in(ADMIN_KEY_VARIABLE) == "set"
    monkeypatch.delenv(ADMIN_KEY_VARIABLE)
    path.write_text("\n")
    assert key_in(ADMIN_KEY_VARIABLE) is None
    path.unlink()
    with pytest.raises(OSError, match="key"):
        key_in(ADMIN_KEY_VARIABLE)
