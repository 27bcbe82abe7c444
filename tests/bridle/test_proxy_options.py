"""What ``bridle proxy`` is told reaches the writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from proxy.server import ProxyServer
from proxy.settings import ProxySettings


@pytest.mark.parametrize(("given", "level"), [((), 1), (("--synchronous", "FULL"), 2)])
def test_a_commit_waits_for_the_disk_when_that_is_asked(
    bridle: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: tuple[str, ...],
    level: int,
) -> None:
    seen: list[Any] = []

    class Looked(ProxyServer):
        def __init__(self, settings: ProxySettings, **options: Any) -> None:
            super().__init__(settings, **options)
            seen.append(self)

    def look() -> None:
        services = seen[0]._server.config.app.services
        with services.writer._engine.connect() as connection:
            seen.append(connection.exec_driver_sql("PRAGMA synchronous").scalar())

    monkeypatch.setattr("proxy.server.ProxyServer", Looked)
    monkeypatch.setattr("bridle.commands.proxy.wait_for_signal", look)
    argv = ("--engine", "http://127.0.0.1:9", "--store", str(tmp_path / "s.db"), "--port", "0")
    done = bridle("proxy", *argv, *given)
    assert done.exit_code == 0, done.output
    assert seen[1] == level
