"""Interception of agents with a fixed base URL: their calls to a provider go to a session.

mitmproxy runs between the agent and everything that it reaches by HTTPS. It opens only the
connections to the providers' addresses, with a certificate authority that is made for this one
command and deleted afterwards, and sends their requests to the session (``proxy/interception.py``).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import certifi

from bridle.errors import BridleError
from bridle.harnesses.client import Session

HOSTS: Final = (
    "api.openai.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
)
VARIABLE: Final = "BRIDLE_MITMDUMP"
ENVIRONMENT: Final = Path(".venv-intercept/bin/mitmdump")
"""The place where ``make intercept`` installs mitmdump, below the current folder."""
ADDON: Final = Path(__file__).parents[1] / "proxy" / "interception.py"
START_S: Final = 60.0
STOP_S: Final = 10.0
_CERTIFICATE: Final = "mitmproxy-ca-cert.pem"


class NoInterception(BridleError):
    """mitmproxy is not installed or does not start."""


def find_mitmdump() -> str:
    """Return the path of mitmdump. Raise :class:`NoInterception` if there is none."""
    named = os.environ.get(VARIABLE)
    found = named or (str(ENVIRONMENT) if ENVIRONMENT.exists() else shutil.which("mitmdump"))
    if found is None or shutil.which(found) is None:
        raise NoInterception(
            f"there is no {named or 'mitmdump'}: `pip install 'mitmproxy>=11,<12'` in an "
            f"environment of its own, and set {VARIABLE} to its mitmdump"
        )
    return found


@contextmanager
def intercepted(session: Session, hosts: Sequence[str] = HOSTS) -> Iterator[dict[str, str]]:
    """Start mitmproxy and yield the variables that lead an agent's calls to the session.

    The calls are those to ``hosts``. Raise :class:`NoInterception`.
    """
    program = find_mitmdump()
    with tempfile.TemporaryDirectory(prefix="bridle-intercept-") as made:
        directory = Path(made)
        port, password = _free_port(), secrets.token_urlsafe(24)
        options = {
            "listen_host": "127.0.0.1",
            "listen_port": port,
            "proxyauth": f"bridle:{password}",
            "allow_hosts": [rf"^{re.escape(host)}(:\d+)?$" for host in hosts],
            # Nothing is asked of the provider, also not what its certificate looks like.
            "connection_strategy": "lazy",
            "upstream_cert": False,
            "bridle_url": session.base_urls["anthropic"],
            "bridle_key": session.key,
        }
        # JSON is YAML. The folder is ours alone; a command line would be for everyone to read.
        (directory / "config.yaml").write_text(json.dumps(options))
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [program, "--quiet", "--set", f"confdir={directory}", "--scripts", str(ADDON)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            _wait(process, port, directory / _CERTIFICATE, log)
            yield _variables(directory, f"http://bridle:{password}@127.0.0.1:{port}")
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _variables(directory: Path, url: str) -> dict[str, str]:
    """Return the variables that make programs use the proxy and trust its certificates.

    The known certificates are trusted, too.
    """
    own = directory / _CERTIFICATE
    bundle = directory / "authorities.pem"
    known = Path(os.environ.get("SSL_CERT_FILE") or certifi.where())
    bundle.write_text(f"{known.read_text()}\n{own.read_text()}")
    together = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    return {
        "HTTPS_PROXY": url,
        "https_proxy": url,
        # Node reads the others only with this set.
        "NODE_USE_ENV_PROXY": "1",
        "NODE_EXTRA_CA_CERTS": str(own),
        **dict.fromkeys(together, str(bundle)),
    }


def _wait(process: subprocess.Popen[bytes], port: int, certificate: Path, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
            continue
        if certificate.exists():
            return
    output = log.read_text(errors="replace").strip()[-1000:]
    raise NoInterception(f"mitmproxy does not start: {output or 'no output'}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
