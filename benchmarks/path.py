"""``bridle bench path``: the length of one chat call's path through the recorder's own code.

A real proxy with a tokenizer serves the second, non-streaming chat call of a session in front of
the scripted engine, under Python's profiler. Every entered function of ours counts, in the two
threads that serve and commit a call: the proxy's event loop and the store's writer. The engine's
threads do not count, and neither does work on a timer beside the calls (``proxy/periodic.py``).
Counts do not depend on the machine's speed.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final

import httpx

import bridle
from bridle.engine.scripted import ScriptedEngine, ScriptedReply
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import Limits, ProxySettings
from bridle.recipes.models.tiny_tokenizer import train_tokenizer

_ROOT: Final = f"{Path(bridle.__file__).parent}/"
_PERIODIC: Final = f"{_ROOT}proxy/periodic.py"
_THREADS: Final = ("bridle-proxy", "store-writer")
_WARM_UP: Final = 2
_SETTLE_S: Final = 0.3
"""Seconds between a reply and the end of all work that belongs to its call."""
_NEVER_S: Final = 3600.0
"""The interval of health checks, longer than a run. The answer to a check arrives outside its
timer, so that its entries would count as a call's."""
_TEXTS: Final = ["four words are here, hello there and again. 0123456789"] * 8


def measure(sessions: int = 5) -> dict[str, Any]:
    """Return the counts of the session with the fewest entries among ``sessions``.

    ``python_calls`` is the number of entered functions, ``modules`` the number of distinct modules
    among them, ``hops`` the number of times that the module changes from one entry of a thread to
    the next, ``room_crossings`` the number of times that its folder does, and ``by_module`` the
    entries by module.
    """
    entries = _Entries()
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as scratch:
        model = Path(scratch) / "model"
        train_tokenizer(model, _TEXTS, vocab_size=512)
        with ScriptedEngine(model, lambda _: ScriptedReply("four words are here")) as engine:
            settings = ProxySettings(
                engine.base_url,
                f"sqlite:///{scratch}/path.db",
                tokenizer_dir=model,
                limits=Limits(health_check_s=_NEVER_S),
            )
            threading.setprofile(entries.profile)
            try:
                proxy = ProxyServer(settings)
                proxy.start()
            finally:
                threading.setprofile(None)
            try:
                with httpx.Client(base_url=proxy.base_url, timeout=60, trust_env=False) as client:
                    found = [_second_call(client, entries, n) for n in range(_WARM_UP + sessions)]
            finally:
                proxy.stop()
    return _report(min(found[_WARM_UP:], key=lambda counted: sum(map(len, counted.values()))))


class _Entries:
    """The modules of the functions that the watched threads enter, in order, by thread."""

    def __init__(self) -> None:
        self.counting = False
        self.modules: dict[str, list[str]] = {}

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.counting or event != "call":
            return
        file = frame.f_code.co_filename
        thread = threading.current_thread().name
        if thread in _THREADS and file.startswith(_ROOT) and not _on_a_timer(frame):
            self.modules.setdefault(thread, []).append(file.removeprefix(_ROOT))


def _on_a_timer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _PERIODIC:
            return True
        frame = frame.f_back
    return False


def _second_call(client: httpx.Client, entries: _Entries, number: int) -> dict[str, list[str]]:
    path = f"/s/path-{number}/v1/chat/completions"
    messages = [{"role": "user", "content": "hello there"}]
    first = client.post(path, json={"model": "policy", "messages": messages}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and again"}]
    time.sleep(_SETTLE_S)
    entries.modules, entries.counting = {}, True
    client.post(path, json={"model": "policy", "messages": messages}).raise_for_status()
    time.sleep(_SETTLE_S)
    entries.counting = False
    return entries.modules


def _report(entered: dict[str, list[str]]) -> dict[str, Any]:
    by_module = Counter(module for modules in entered.values() for module in modules)
    steps = [step for modules in entered.values() for step in pairwise(modules)]
    return {
        "modules": len(by_module),
        "hops": sum(before != after for before, after in steps),
        "room_crossings": sum(Path(before).parent != Path(after).parent for before, after in steps),
        "python_calls": by_module.total(),
        "by_module": dict(by_module.most_common()),
    }
