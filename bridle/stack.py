"""A policy, served and recorded: an engine and the proxy in front of it, while a command runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bridle.services import Service
from engine.client import EngineClient

MODEL = "policy"


@dataclass(frozen=True, slots=True)
class Stack:
    """Where to reach what is running."""

    engine_url: str
    proxy_url: str

    def engine(self) -> EngineClient:
        return EngineClient(self.engine_url)

    def announce(self, version: int) -> None:
        """Tells the proxy which policy version the engine serves from now on, an earlier one when
        a publish was taken back."""
        reply = httpx.put(
            f"{self.proxy_url}/bridle/v1/policy",
            json={"version": version, "back": True},
            trust_env=False,
        )
        reply.raise_for_status()


@contextmanager
def stack(policy: Path, store: str, logs: Path, *, version: int = 0) -> Iterator[Stack]:
    """The embedded engine serving ``policy`` as ``version``, and a proxy recording to ``store``."""
    with (
        Service(
            [
                "engine",
                "embedded",
                "--model",
                str(policy),
                "--served-model-name",
                MODEL,
                "--port",
                "0",
            ],
            logs / "engine.log",
        ) as engine,
        proxy(engine.url, policy, store, logs) as proxy_url,
    ):
        running = Stack(engine.url, proxy_url)
        running.announce(version)
        yield running


@contextmanager
def proxy(engine_url: str, tokenizer: Path, store: str, logs: Path) -> Iterator[str]:
    """A proxy in front of ``engine_url``, on a port of its own; yields its base URL."""
    arguments = ["proxy", "--upstream", engine_url, "--tokenizer", str(tokenizer)]
    with Service([*arguments, "--store", store, "--port", "0"], logs / "proxy.log") as service:
        yield service.url
