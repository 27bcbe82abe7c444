"""Draw the README's pictures: the plot of a demo, and tokens of a session in the viewer.

Run it as ``python docs/site/pictures.py DEMO STORE``, with the folder that ``make demo`` leaves in
``runs/demo`` and a store whose newest session is shown. It writes ``docs/results/demo.png`` with
its figures in ``demo.json``, and ``docs/results/tokens.png``, which Chromium draws.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from bridle.recipes.demo.report import plot
from bridle.store.reading.queries import Reader

RESULTS = Path(__file__).parents[1] / "results"


def draw_tokens(store: Path, path: Path) -> None:
    """Take the picture of the last turn's tokens of the newest session of a store."""
    with Reader(str(store)) as reader:
        session = next(reader.sessions(newest_first=True)).id
    command = [sys.executable, "-m", "bridle", "viewer", "--store", str(store)]
    command += ["--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        address = json.loads(next(iter(viewer.stdout or ())))["url"]
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            page = chromium.new_page(viewport={"width": 900, "height": 700}, device_scale_factor=2)
            page.goto(f"{address}/sessions/{session}")
            turn = page.locator("#turn-2")
            turn.locator("[data-tokens]").click()
            token = turn.locator("token-strip .tk").nth(12)
            token.click()
            turn.screenshot(path=path)
            chromium.close()
        viewer.terminate()


def main(demo: Path, store: Path) -> None:
    """Draw both pictures."""
    report = json.loads((demo / "report.json").read_text())
    (RESULTS / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(report, RESULTS / "demo.png")
    draw_tokens(store, RESULTS / "tokens.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
