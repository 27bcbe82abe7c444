"""A benchmark of sessions per second in local processes, in fresh containers, and in forks in both.

The same agent does the same scripted work each time. The kinds of sandboxes take turns, so that
other load on the machine affects them equally; a figure is the median of its rounds.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bridle.bench.shell_policy import ShellPolicy, train_bench_tokenizer
from bridle.engine.scripted import ScriptedEngine
from bridle.harnesses.adapters import ADAPTERS
from bridle.harnesses.adapters.mini_swe_agent import MiniSweAgent
from bridle.harnesses.client import Client
from bridle.harnesses.episode import Outcome
from bridle.harnesses.fleet import LocalFleet
from bridle.harnesses.rollout import Job, Rollout, RolloutSettings
from bridle.harnesses.sandboxes import ContainerProvider, ProcessProvider, SandboxProvider
from bridle.harnesses.sandboxes.container.engine import Engine
from bridle.harnesses.verifiers import RegexAnswer
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings

_LISTINGS: Final = {
    "container": ("--all", "--format", "{{.Names}}"),
    "volume": ("--format", "{{.Name}}"),
    "network": ("--format", "{{.Name}}"),
}


@dataclass(frozen=True, slots=True)
class Speeds:
    """Sessions per second in each kind of sandbox."""

    harness: str
    sessions: int
    """Number of sessions per round."""
    parallel: int
    per_s: dict[str, float]
    ran: int
    """Number of sessions in all rounds, those of the warm-up included."""
    left_behind: list[str]
    """The containers, volumes, networks and socket folders that exist now and did not exist
    before."""

    @property
    def ratios(self) -> dict[str, float]:
        """The speed in containers, divided by the speed of the same agent without them."""
        pairs = (("container", "local"), ("container-forked", "forked"))
        return {
            one: self.per_s[one] / self.per_s[other] for one, other in pairs if one in self.per_s
        }

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"ratios": self.ratios}


async def bench_containers(
    harness: str, sessions: int, parallel: int, rounds: int, progress: Callable[[str], None]
) -> Speeds:
    """Measure one harness in each kind of sandbox.

    Raise ``RuntimeError`` if a session does not complete.
    """
    policy = ShellPolicy(1)
    ways: dict[str, SandboxProvider] = {
        "local": ProcessProvider(),
        "container": ContainerProvider(harness),
    }
    adapter = ADAPTERS.get(harness)()
    if isinstance(adapter, MiniSweAgent):
        ways |= {"forked": adapter.sandboxes(), "container-forked": adapter.warm_containers()}
    took: dict[str, list[float]] = {name: [] for name in ways}
    before, ran = await _there(), 0
    with tempfile.TemporaryDirectory(prefix="bench-containers-") as made:
        place = Path(made)
        train_bench_tokenizer(place / "model")
        with ScriptedEngine(place / "model", policy, max_model_len=1_000_000) as engine:
            settings = ProxySettings(
                engine.base_url, str(place / "bench.db"), tokenizer_dir=place / "model"
            )
            with ProxyServer(settings) as proxy:
                async with Client(proxy.base_url) as client:
                    for number in range(rounds + 1):
                        for name, sandboxes in ways.items():
                            rollout = Rollout(
                                client,
                                adapter,
                                LocalFleet(sandboxes, RegexAnswer("last line")),
                                RolloutSettings(place / name, parallel=parallel, retries=0),
                            )
                            # The first round warms up: it installs layers and reads files.
                            count = sessions if number else parallel
                            jobs = [Job(policy.task(f"{name}-{number}-{n}")) for n in range(count)]
                            started = time.monotonic()
                            results = await rollout.collect(jobs)
                            seconds = time.monotonic() - started
                            ran += count
                            bad = [r for r in results if r.outcome is not Outcome.COMPLETED]
                            if bad:
                                raise RuntimeError(f"{name}: {bad[0]}")
                            if number:
                                took[name].append(seconds)
                                progress(f"{name}: {count / seconds:.2f} sessions/s")
        for sandboxes in ways.values():
            await sandboxes.close()
    speeds = {name: sessions / median(seconds) for name, seconds in took.items()}
    left = sorted(await _there() - before)
    return Speeds(harness, sessions, parallel, speeds, ran, left)


async def _there() -> set[str]:
    """Return the names of the objects that sessions in containers could leave behind.

    The layer of a harness is not among them, because it is kept on purpose.
    """
    engine = Engine.find()
    found = await asyncio.to_thread(_folders)
    for kind, listing in _LISTINGS.items():
        listed = await engine.check(kind, "ls", *listing)
        found |= {f"{kind} {name}" for name in listed.decode().split()}
    return {name for name in found if not name.startswith("volume bridle-harness-")}


def _folders() -> set[str]:
    return {str(folder) for folder in Path(tempfile.gettempdir()).glob("bridle-sandboxes-*")}
