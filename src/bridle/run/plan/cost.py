"""Measure what a proxy spends on sessions of a shape: a real one records them on this machine.

The engine is scripted and samples as many tokens as are planned. The proxy is a separate process,
so that its processor time can be measured alone.
"""

from __future__ import annotations

import asyncio
import math
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import orjson

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.errors import BridleError
from bridle.keys import ADMIN_KEY_VARIABLE
from bridle.run.plan.workload import Workload
from bridle.run.services import Service
from bridle.run.stack import new_key
from bridle.store.schema.database import migrate

_TOKENS: Final = 150_000
"""The number of tokens in all measured sessions, which take some seconds."""
_AT_ONCE: Final = 4
_TIMEOUT_S: Final = 120.0


class NotMeasured(BridleError):
    """The measured proxy did not answer a call; the message says why."""


@dataclass(frozen=True, slots=True)
class RecordingCost:
    sessions: int
    """Number of sessions that were measured."""
    cpu_s_per_call: float
    """The proxy's processor time in seconds per call."""
    bytes_per_session: float
    """Bytes per session in the store, indexes and exact bodies included."""


def recording_cost(workload: Workload, model: Path) -> RecordingCost:
    """Record sessions of the workload's shape, in whole turns, with the model's tokenizer.

    Return what they cost.

    Raise :class:`NotMeasured`, and :class:`bridle.run.services.ServiceFailed`.
    """
    text = _Text(Tokenizer(model))
    turns = max(1, round(workload.turns))
    sessions = max(2 * _AT_ONCE, math.ceil(_TOKENS / workload.tokens))

    def play(request: ScriptedRequest) -> ScriptedReply:
        return ScriptedReply(text.of(workload.sampled, len(request.prompt_ids)), logprob=-0.5)

    longest = 2 * math.ceil(workload.tokens) + 1024
    with (
        TemporaryDirectory(prefix="bridle-plan-") as folder,
        ScriptedEngine(model, play, max_model_len=longest) as engine,
    ):
        store = Path(folder) / "plan.db"
        migrate(str(store))
        empty, key = store.stat().st_size, new_key()
        arguments = ["proxy", "--upstream", engine.base_url, "--port", "0", "--store", str(store)]
        arguments += ["--tokenizer", str(model)]
        keys = {ADMIN_KEY_VARIABLE: key}
        with Service(arguments, store.with_suffix(".log"), keys) as proxy:
            before = _cpu_s(proxy.pid)
            sending = httpx.AsyncClient(
                base_url=proxy.url,
                headers={"authorization": f"Bearer {key}"},
                timeout=_TIMEOUT_S,
                trust_env=False,
            )
            asyncio.run(_play(sending, engine.model, workload, turns, sessions, text))
            spent = _cpu_s(proxy.pid) - before
        return RecordingCost(
            sessions, spent / (sessions * turns), (store.stat().st_size - empty) / sessions
        )


class _Text:
    """Pieces of Python's own source with a given number of tokens.

    Each differs from the others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))[:40]
        source = "\n".join(file.read_text(errors="replace") for file in files)
        self._ids = tokenizer.encode(source)
        self._decode = tokenizer.decode
        self._at = 0

    def of(self, tokens: float, skip: int = 0) -> str:
        """Return a text of about ``tokens`` tokens.

        ``skip`` moves on to text that was not given before.
        """
        count = max(1, round(tokens))
        self._at = (self._at + count + skip) % max(1, len(self._ids) - count)
        return self._decode(self._ids[self._at : self._at + count])


async def _play(
    client: httpx.AsyncClient,
    model: str,
    workload: Workload,
    turns: int,
    sessions: int,
    text: _Text,
) -> None:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def session(number: int) -> None:
        messages = [{"role": "user", "content": text.of(workload.prompt)}]
        async with slots:
            for _ in range(turns):
                body = {"model": model, "messages": messages, "stream": True}
                reply = await _reply(client, f"/s/plan-{number}/v1/chat/completions", body)
                messages.append({"role": "assistant", "content": reply})
                messages.append({"role": "user", "content": text.of(workload.added)})

    async with client:
        try:
            await asyncio.gather(*map(session, range(sessions)))
        except httpx.HTTPError as error:
            raise NotMeasured(f"the measured proxy did not answer a call: {error}") from error


async def _reply(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    """Return a streamed reply's text."""
    said = []
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = orjson.loads(line[6:])["choices"]
                said += [choice["delta"].get("content") or "" for choice in choices]
    return "".join(said)


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process so far in seconds, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
