"""Record the README's first commands as an animated SVG of a terminal.

Run it as ``python docs/site/recording.py FOLDER > docs/recording.svg``. The commands run for real,
in a new folder, which keeps the store that they recorded to. Each line of the picture appears when
its command had printed it; a wait of more than a second is shortened. The picture follows the
reader's light or dark scheme, and stands still where motion is not wanted. It loads nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

SCRIPTED = "bridle engine scripted &"
PROXY = "bridle proxy --engine http://127.0.0.1:8000 &"
ANNOUNCED: Final = {SCRIPTED: "Scripted engine", PROXY: "  upstream"}
"""The commands that go on in the background, and how their last line before that begins."""
COMMANDS: Final = (
    SCRIPTED,
    PROXY,
    "bridle examples openai_sdk",
    'bridle run -- python examples/openai_sdk/agent.py "What is the weather in Oslo?"',
    "bridle sessions",
    "bridle reward last 1.0",
    "bridle audit",
    "bridle export weather.jsonl",
)
COLUMNS: Final = 96
LINE, CHARACTER, MARGIN = 19.0, 8.4, 16.0
TYPED_S: Final = 0.9
"""Seconds in which a command is typed."""
LONGEST_WAIT_S: Final = 1.0
STYLE: Final = """
text { font: 14px ui-monospace, Menlo, Consolas, monospace; white-space: pre; fill: #24292f }
.screen { fill: #f6f8fa; stroke: #d0d7de } .hide { fill: #f6f8fa } .typed { fill: #0550ae }
.line { opacity: 0; animation: show 0.01s forwards }
@keyframes show { to { opacity: 1 } }
@keyframes uncover { to { transform: translateX(100%) } }
@media (prefers-color-scheme: dark) {
  text { fill: #c9d1d9 } .screen { fill: #0d1117; stroke: #30363d } .hide { fill: #0d1117 }
  .typed { fill: #79c0ff }
}
@media (prefers-reduced-motion: reduce) {
  .line { opacity: 1; animation: none } .hide { display: none }
}
"""


@dataclass(frozen=True)
class Line:
    """A line of the terminal, and the second at which it appears."""

    text: str
    at: float
    typed: bool = False


def run(commands: Sequence[str], folder: Path) -> Iterator[Line]:
    """Run commands as a shell would, and yield the lines as they come."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BRIDLE_HOME": str(folder / "home"),
        "BRIDLE_STORE": str(folder / "bridle.db"),
        "COLUMNS": str(COLUMNS),
    }
    clock, served = 0.5, []
    for command in commands:
        yield Line(f"$ {command}", clock, typed=True)
        clock += TYPED_S
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command.removesuffix(' &')}"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        last, announced = time.monotonic(), ANNOUNCED.get(command)
        for printed in process.stdout or ():
            now = time.monotonic()
            clock += min(LONGEST_WAIT_S, now - last)
            last = now
            text = printed.rstrip().replace(str(folder), "~")
            for begin in range(0, len(text), COLUMNS):
                yield Line(text[begin : begin + COLUMNS], clock)
            if announced and printed.startswith(announced):
                break
        if announced:
            served.append(process)
        elif process.wait():
            raise SystemExit(f"{command} ended with {process.returncode}")
        clock += 0.4
    for process in reversed(served):
        process.send_signal(signal.SIGINT)
        process.wait()


def drawn(lines: Sequence[Line]) -> str:
    """Return the SVG of a terminal that shows ``lines``, each from its second on."""
    width = 2 * MARGIN + COLUMNS * CHARACTER
    height = 2 * MARGIN + len(lines) * LINE
    rows = []
    for number, line in enumerate(lines):
        top = MARGIN + number * LINE
        kind = ' class="typed"' if line.typed else ""
        row = f'<text{kind} x="{MARGIN}" y="{top + 14:.0f}">{escape(line.text)}</text>'
        if line.typed:
            length, steps = len(line.text) * CHARACTER + 4, len(line.text)
            timing = f"{TYPED_S}s steps({steps}) {line.at:.2f}s forwards uncover"
            row += (
                f'<svg x="{MARGIN}" y="{top - 1:.0f}" width="{length:.0f}" height="{LINE:.0f}">'
                f'<rect class="hide" width="100%" height="100%" style="animation:{timing}"/></svg>'
            )
        rows.append(f'<g class="line" style="animation-delay:{line.at:.2f}s">{row}</g>')
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            "<title>An agent is recorded, rewarded, audited and exported in a terminal</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="screen" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            *rows,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    place.mkdir(parents=True)
    print(drawn(list(run(COMMANDS, place))))
