"""Gives the commands of installed Python packages the Python that they are mounted with.

``scripts.py FOLDER``: the packages are in ``FOLDER/packages``, the commands go to ``FOLDER/bin``.
"""

from __future__ import annotations

import sys
from pathlib import Path

folder = Path(sys.argv[1])
for script in (folder / "packages/bin").iterdir():
    if not script.is_file():
        continue
    first, _, rest = script.read_text(errors="replace").partition("\n")
    is_python = first.startswith("#!") and "python" in first
    if is_python and not (folder / "bin" / script.name).exists():
        # Isolated: a PYTHONPATH of the task is not the harness's.
        paths = f"import site\nsite.addsitedir({str(folder / 'packages')!r})\n"
        head = f"#!{folder}/bin/python3 -I\n{paths}"
        (folder / "bin" / script.name).write_text(head + rest)
        (folder / "bin" / script.name).chmod(0o755)
