"""Check a machine: its proxy, harnesses and versions, and a deployment's keys, disk and clock."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx

from bridle.harnesses.adapters import PROGRAMS
from bridle.keys import KEYS
from bridle.run.environment import admin_key_file, admin_key_for, data_home, key_in
from bridle.store.errors import StoreUnavailable
from bridle.store.schema.database import database_url

LEAST_BYTES: Final = 2 * 10**9
"""The free space below which a deployment is broken: a few minutes of records of a busy proxy."""
MOST_SKEW_S: Final = 5.0
"""Maximum seconds between two machines' clocks; beyond it, times of one session are out of
order."""
PACKAGES: Final = ("bridle-rl", "torch", "transformers", "peft", "sqlalchemy", "psycopg", "ray")


def examine_keys() -> dict[str, Any]:
    """Return which keys are set.

    A key file that other users can read, or that cannot be read, is broken.
    """
    lines, broken = [], []
    for variable in KEYS:
        named = os.environ.get(f"{variable}_FILE")
        try:
            found = key_in(variable)
        except OSError as error:
            broken.append(f"{variable}_FILE cannot be read: {error.strerror}: {named}")
            continue
        lines.append(f"{variable}: {'set' if found else 'not set'}")
        if named and not os.environ.get(variable):
            broken += _open_to_others(Path(named))
    if admin_key_file().exists():
        lines.append(f"{admin_key_file()}: there")
        broken += _open_to_others(admin_key_file())
    return {"lines": [*lines, *broken], "broken": "; ".join(broken) or None}


def _open_to_others(file: Path) -> list[str]:
    if stat.S_IMODE(file.stat().st_mode) & stat.S_IROTH:
        return [f"every user of this machine can read {file}: chmod o= {file}"]
    return []


def examine_disk(store: str) -> dict[str, Any]:
    """Return the free space where recordings are written.

    Recordings are written to the data folder, and to a store that is a file.
    """
    places = {data_home()}
    try:
        url = database_url(store)
        if url.get_backend_name() == "sqlite":
            places.add(Path(str(url.database)).absolute().parent)
    except StoreUnavailable:
        pass  # the part `store` says so
    lines, broken = [], []
    for place in sorted(places):
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        lines.append(f"{place}: {free / 1e9:.1f} GB free")
        if free < LEAST_BYTES:
            broken.append(
                f"{place} has {free / 1e9:.1f} GB free, less than {LEAST_BYTES / 1e9:g}: free "
                "some, or `bridle forget` old sessions"
            )
    return {"lines": [*lines, *broken], "broken": "; ".join(broken) or None}


def examine_proxy(url: str) -> dict[str, Any]:
    """Return the state of the proxy at ``url`` and of its engines.

    A proxy that does not run is not broken. One that runs and is not ready is.
    """
    root = url.rstrip("/").removesuffix("/v1")
    try:
        reply = httpx.get(f"{root}/readyz", timeout=10, trust_env=False)
        state = reply.json()
        ready, circuits = state["status"], state["circuits"]
    except httpx.HTTPError:
        line = f"none runs at {root}: start it with `bridle proxy --engine URL`"
        return {"lines": [line], "broken": None}
    except (ValueError, KeyError, TypeError):
        line = f"{root} is no Bridle proxy: name the proxy's address with --proxy"
        return {"lines": [line], "broken": line}
    lines = [f"{root} is {ready.replace('_', ' ')}; circuits of its engines: {', '.join(circuits)}"]
    if ready == "ready":
        return {"lines": lines, "broken": None}
    remedy = _REMEDIES.get(ready, "read the proxy's log")
    return {"lines": [*lines, remedy], "broken": f"{lines[0]}: {remedy}"}


_REMEDIES: Final = {
    "engine_unreachable": "start its engine, or start the proxy with the address at which the "
    "engine listens; `bridle status` prints it",
    "store_unavailable": "read the proxy's log for why the last record could not be written",
}


def examine_harnesses() -> dict[str, Any]:
    """Return which of the programs that ``bridle run`` configures are here. None is broken."""
    here = [program for program in PROGRAMS if shutil.which(program)]
    lines = [f"`bridle run` configures {', '.join(PROGRAMS)}", f"here: {', '.join(here) or 'none'}"]
    return {"lines": lines, "broken": None}


def examine_versions() -> dict[str, Any]:
    """Return the versions that run here, so that two machines can be compared.

    None of them is broken.
    """
    lines = [f"Python {platform.python_version()} on {platform.platform(terse=True)}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    if find_spec("bridle.bench") is not None:
        lines.append("bridle is a checkout")
    return {"lines": lines, "broken": None}


def examine_clock(url: str) -> dict[str, Any]:
    """Return the difference between this machine's clock and that of the proxy at ``url``."""
    began = time.time()
    try:
        reply = httpx.get(f"{url.rstrip('/')}/healthz", timeout=10, trust_env=False)
        theirs = float(reply.raise_for_status().json()["time"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        silent = f"no proxy answers at {url} ({error}): start it, or name it by --proxy"
        return {"lines": [silent], "broken": silent}
    skew = theirs - (began + time.time()) / 2
    line = f"the clock of {url} is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    broken = f"{line}: set both by NTP" if abs(skew) > MOST_SKEW_S else None
    return {"lines": [broken or line], "broken": broken}


def examine_upstreams(url: str) -> dict[str, Any] | None:
    """Return what the proxy at ``url`` has learned of other providers' APIs.

    Return ``None`` if no proxy answers there, or if it has no such API.
    """
    key = admin_key_for(url)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        reply = httpx.get(
            f"{url.rstrip('/')}/bridle/v1/upstreams", headers=headers, timeout=10, trust_env=False
        )
        found = reply.raise_for_status().json()
        lines = [_learned(one) for one in found]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return {"lines": lines, "broken": None, "upstreams": found} if found else None


def _learned(upstream: dict[str, Any]) -> str:
    facts = (
        ("passed on as they are", upstream["passes"]),
        ("limit of a reply", [upstream["limit"]] if upstream["limit"] else []),
        ("gets back", upstream["wants"]),
        ("refuses", upstream["refuses"]),
    )
    known = "; ".join(f"{name}: {', '.join(values)}" for name, values in facts if values)
    return f"{upstream['model']} at {', '.join(upstream['urls'])}: {known or 'nothing learned yet'}"
