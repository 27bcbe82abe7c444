"""The recorder on every supported Python: ``python tests/pythons.py [VERSION ...]``.

Builds the wheel, then for each interpreter found makes an environment (``.venv-python3.N``) with
the wheel and no torch, and runs the tests of the store, the dialects, lineage and the proxy there.
Exits with 1 when one of them fails, or none was found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
TESTS = ("store", "dialects", "lineage", "proxy")
NEEDED = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis"),
    *("openai", "anthropic", "google-genai", "schemathesis", "opentelemetry-sdk", "pandas"),
    *("opentelemetry-exporter-otlp-proto-http", "aiohttp", "pyyaml"),
    *("langchain", "langchain-openai"),
)
WITHOUT = ("torch", "transformers")


def interpreter(version: str) -> str | None:
    """A Python of this version that starts: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for found in (shutil.which(f"python{version}"), *map(str, installed)):
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        if found is not None:
            told = subprocess.run([found, "-c", ask], capture_output=True, text=True, check=False)
            if told.stdout.strip() == version:
                return found
    return None


def check(version: str, python: str, wheel: Path) -> bool:
    """Return whether the recorder's tests pass there."""
    environment = ROOT / f".venv-python{version}"
    if not (environment / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
    own = str(environment / "bin" / "python")
    pip = [own, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, f"{wheel}[postgres,redact]", *NEEDED], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    for module in WITHOUT:
        if subprocess.run([own, "-c", f"import {module}"], capture_output=True).returncode == 0:
            raise SystemExit(f"{environment} has {module}: the recorder must be tested without it")
    subprocess.run([own, "-P", "-m", "bridle", "--help"], check=True, stdout=subprocess.DEVNULL)
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    return subprocess.run([own, "-m", "pytest", "-n", "auto", *tests], cwd=ROOT).returncode == 0


def main() -> None:
    passed: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as made:
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            made,
            str(ROOT),
        ]
        subprocess.run(build, check=True)
        (wheel,) = Path(made).glob("*.whl")
        for version in sys.argv[1:] or VERSIONS:
            python = interpreter(version)
            if python is None:
                print(f"Python {version}: not found here", flush=True)
                continue
            print(f"Python {version}: {python}", flush=True)
            passed[version] = check(version, python, wheel)
    for version, well in passed.items():
        print(f"Python {version}: {'passed' if well else 'FAILED'}")
    raise SystemExit(0 if passed and all(passed.values()) else 1)


if __name__ == "__main__":
    main()
