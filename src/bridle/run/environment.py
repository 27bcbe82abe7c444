"""Defaults that come from the environment: folders, addresses, keys."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from bridle.errors import UsageError
from bridle.keys import ADMIN_KEY_VARIABLE, KEYS
from bridle.store.schema.files import data_home as data_home
from bridle.store.schema.files import default_store as default_store

EngineKind = Literal["embedded", "vllm"]
DEFAULT_PORT = 8484

_RANK_NAMES: Final = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_RANK_PREFIXES: Final = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")


_OF_A_RUN: Final = (
    "bridle.db",
    "given-rewards.jsonl",
    "checkpoints",
    "published",
    "policies",
    "logs",
    "best",
)


def default_proxy() -> str:
    """Return ``$BRIDLE_PROXY``, else the address that ``bridle proxy`` listens on by default."""
    return os.environ.get("BRIDLE_PROXY") or f"http://127.0.0.1:{DEFAULT_PORT}"


def key_in(variable: str) -> str | None:
    """Return the key in an environment variable, or else in the file that ``VARIABLE_FILE`` names.

    An empty key is ``None``, and opens nothing. Raise ``OSError`` for a file that cannot be read.
    """
    if not os.environ.get(variable) and (path := os.environ.get(f"{variable}_FILE")):
        return Path(path).read_text().strip() or None
    return os.environ.get(variable) or None


def key_files() -> list[Path]:
    """Return the files that hold our keys, which need not exist.

    They are those that the environment names, and the one that ``bridle proxy`` makes. An open file
    without a name (``/dev/fd/N``) is none of them.
    """
    named = [os.environ.get(f"{variable}_FILE", "") for variable in KEYS]
    files = [Path(path) for path in named if path and not path.startswith("/dev/fd/")]
    return [*files, admin_key_file()]


def store_files(store: str) -> list[Path]:
    """Return the file of an SQLite store, by its path or URL; another database has none."""
    path = re.sub(r"^sqlite(\+\w+)?:///", "", store)
    return [] if "://" in path or not path else [Path(path)]


def private_in(output: Path) -> tuple[Path, ...]:
    """Return the files and folders of a run's ``output`` that its sessions may not see.

    They are the whole folder of the training run, or, if the command runs in it, the parts that the
    run makes there.
    """
    inside = output.absolute().resolve()
    if Path.cwd().resolve().is_relative_to(inside):
        return tuple(inside / name for name in _OF_A_RUN)
    return (inside,)


def admin_key_for(proxy_url: str, given: str | None = None) -> str | None:
    """Return the admin key of the proxy at a URL.

    It is ``given``, else ``$BRIDLE_ADMIN_KEY``, else, for a proxy on this machine, the key that
    ``bridle proxy`` made for itself.
    """
    key = given or key_in(ADMIN_KEY_VARIABLE)
    if key is None and _on_this_machine(proxy_url):
        with contextlib.suppress(OSError):
            key = admin_key_file().read_text(encoding="ascii").strip() or None
    return key


def made_admin_key() -> str:
    """Return this user's admin key for proxies on this machine.

    It is made at its first use, in a file that only the user can read. Raise
    :class:`bridle.errors.UsageError` if it cannot be kept.
    """
    file = admin_key_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            whole = file.with_name(f"{file.name}.{os.getpid()}")
            with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
                made.write(secrets.token_urlsafe(32))
            try:
                os.link(whole, file)
            finally:
                whole.unlink()
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError(
            f"cannot keep an admin key in {file}: {error.strerror}; set {ADMIN_KEY_VARIABLE}"
        ) from error


def admin_key_file() -> Path:
    """Return the file in which ``bridle proxy`` keeps the key that it made."""
    return data_home() / "admin.key"


def _on_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_base_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        _ = url.port  # raises for a port that is not a number
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the variables that torchrun adds.

    It is for a child process that takes no part in the training.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _RANK_NAMES and not name.startswith(_RANK_PREFIXES)
    }
