"""``bridle bench re-entry --speed``: the time that a re-entry saves, without a harness's own.

A plain loop talks with a model through the proxy: each turn it sends the whole conversation and
adds a made-up result. The session is re-entered late. What is compared is the time until that turn
is asked, once with the model's replies and once with the recorded ones.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bridle.engine.embedded import EmbeddedEngine
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.store.reading.queries import Reader

MOST: Final = 0.05
"""The largest share of the recording's time that a re-entry may take."""
_RESULT_WORDS: Final = 60
_WORDS: Final = "the test of a file that failed reads one line and prints its number again"


@dataclass(frozen=True, slots=True)
class Speed:
    """The times of one session and of its re-entry."""

    turns: int
    branch: int
    """The turn that is asked live, from 1."""
    reply_tokens: int
    """Tokens that the engine sampled before the branch."""
    prompt_tokens: int
    """Tokens of the prompt at the branch."""
    recorded_s: float
    """Seconds that the turns before the branch took when they were recorded."""
    again_s: float
    """Seconds that they took when they were replayed, with the new session's creation."""
    replayed: int
    """Turns that were answered from the record."""
    equal: bool
    """True if the prompt at the branch has the recorded ids."""

    @property
    def share(self) -> float:
        """Share of the recording's time that the re-entry took."""
        return self.again_s / self.recorded_s

    def failures(self) -> list[str]:
        """Return one line for each requirement that fails."""
        found = []
        if self.share > MOST:
            found.append(f"the re-entry took {self.share:.1%} of the recording's time")
        if self.replayed != self.branch - 1:
            found.append(f"{self.replayed} of {self.branch - 1} turns were replayed")
        if not self.equal:
            found.append(f"the prompt of turn {self.branch} is not the recorded one")
        return found

    def text(self) -> str:
        """Return the times in a sentence, with what fails below."""
        line = (
            f"{self.turns} turns, re-entered at turn {self.branch}: the {self.branch - 1} turns "
            f"before it ({self.reply_tokens} sampled tokens, a prompt of {self.prompt_tokens} "
            f"tokens in the end) took {self.recorded_s:.1f} s when they were recorded and "
            f"{self.again_s:.2f} s again: {self.share:.2%}"
        )
        return "\n".join([line, *(f"fails: {one}" for one in self.failures())])


def measure(model: Path, *, turns: int = 30, branch: int = 25, max_tokens: int = 64) -> Speed:
    """Record a session of ``turns`` turns with ``model``, and re-enter it at ``branch``.

    ``model`` is a model directory, which the embedded engine serves in this process.
    """
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        store = str(Path(folder, "bench.db"))
        with (
            EmbeddedEngine(model) as engine,
            ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model)) as proxy,
            httpx.Client(base_url=proxy.base_url, timeout=600, trust_env=False) as http,
            Reader(store) as reader,
        ):
            loop = _Loop(http, engine.model, max_tokens)
            loop.play(_begun(http), 1)  # what is made once for each process
            session = _begun(http)
            recorded_s = sum(loop.play(session, turns)[: branch - 1])
            calls = reader.calls(session)
            started = time.perf_counter()
            again = _begun(http, {"session": session, "call": calls[branch - 1].id})
            created_s = time.perf_counter() - started
            seconds = loop.play(again, branch)
            own = reader.calls(again)
            was, now = (reader.prompt_token_ids(one[branch - 1].id) for one in (calls, own))
            return Speed(
                turns,
                branch,
                sum(call.sampled_tokens or 0 for call in calls[: branch - 1]),
                calls[branch - 1].prompt_tokens or 0,
                recorded_s,
                created_s + sum(seconds[: branch - 1]),
                sum(call.replayed_call_id is not None for call in own),
                was is not None and now is not None and list(was) == list(now),
            )


@dataclass(frozen=True, slots=True)
class _Loop:
    """An agent that costs nothing: it sends the conversation, and makes up a result."""

    http: httpx.Client
    model: str
    max_tokens: int

    def play(self, session: str, turns: int) -> list[float]:
        """Take so many turns in a session, and return the seconds of each."""
        drawn, seconds = random.Random(0), []
        messages: list[Any] = [{"role": "user", "content": "Find out why the test fails."}]
        for turn in range(1, turns + 1):
            body = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens}
            started = time.perf_counter()
            reply = self.http.post(f"/s/{session}/v1/chat/completions", json=body)
            reply.raise_for_status()
            seconds.append(time.perf_counter() - started)
            said = reply.json()["choices"][0]["message"]["content"]
            result = " ".join(drawn.choices(_WORDS.split(), k=_RESULT_WORDS))
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"Result {turn}: {result}"},
            ]
        return seconds


def _begun(http: httpx.Client, origin: dict[str, str] | None = None) -> str:
    made = http.post("/bridle/v1/sessions", json={} if origin is None else {"origin": origin})
    made.raise_for_status()
    return str(made.json()["id"])
