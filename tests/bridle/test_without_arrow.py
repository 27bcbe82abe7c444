"""Recording and reading without pyarrow, which is 170 MB: the extra ``arrow``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridle.proxy.wire.canonical import ApiError
from bridle.run import feed
from bridle.store.reading.queries import Reader
from bridle.store.schema.database import migrate

PROGRAM = "import sys; sys.modules['pyarrow'] = None; from bridle.cli.program import app; app()"


def bridle(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False
    )


def test_the_proxys_own_modules_load_without_it() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None; import bridle.run.feed, bridle.proxy.server, "
        "bridle.viewer.app, bridle.reconstruct.exports.formats, bridle.reconstruct.audit"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_export_as_parquet_names_the_extra(tmp_path: Path) -> None:
    store = str(tmp_path / "bridle.db")
    migrate(store)
    refused = bridle("export", str(tmp_path / "samples.parquet"), "--store", store)
    assert refused.returncode != 0
    assert "bridle-rl[arrow]" in refused.stderr


def test_rows_in_a_parquet_file_name_the_extra(tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    refused = bridle("tasks", "convert", "swebench", str(rows), str(tmp_path / "tasks"))
    assert refused.returncode != 0
    assert "bridle-rl[arrow]" in refused.stderr


def test_the_feed_refuses_arrow_and_names_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "bridle.db")
    migrate(store)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with Reader(store) as reader, pytest.raises(ApiError, match="ask for ndjson") as refused:
        feed._told(reader, (), "arrow", "tree", {})
    assert refused.value.status == 501
