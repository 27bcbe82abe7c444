"""Sessions of ``bridle bench collect`` that a scripted engine streams through the proxy.

Each is a conversation of :data:`TURNS` calls, which is recorded, rewarded, sealed and loaded as a
run does. New versions are written to disk and swapped into the engine while it streams, with
``pause_mode = "keep"``. The engine has no weights, so no publish compares logprobs.
"""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Self

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from bridle.bench.collect import CollectSettings, SlottedSessions
from bridle.engine.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest
from bridle.harnesses.client import Client, SessionRequest
from bridle.proxy.server import ProxyServer
from bridle.proxy.settings import ProxySettings
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.samples.sample import Episode
from bridle.run.stack import Stack
from bridle.run.training import loaded_episode
from bridle.store.reading.queries import Reader
from bridle.store.records import PolicyRecord
from bridle.trainer.config import PublishConfig
from bridle.trainer.policy.model import load_policy, vocabulary_size
from bridle.trainer.publish.publisher import Publisher, default_probes

TURNS: Final = 3
_PACE: Final = re.compile(r"pace (\d+\.\d+) seconds")
_REPLY: Final = "one two three four five six seven"


class StreamedSessions(SlottedSessions):
    """Sessions that lead conversations through a proxy in front of a scripted engine."""

    def __init__(self, settings: CollectSettings) -> None:
        super().__init__(settings)
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        folder = Path(self._opened.enter_context(TemporaryDirectory(prefix="bridle-collect-")))
        model = folder / "model"
        size = train_tokenizer(model, [_REPLY])
        make_policy(model, TinyShape(hidden=32, layers=1), vocab_size=size)
        self._policy = load_policy(model)
        engine = self._opened.enter_context(ScriptedEngine(model, _reply))
        self._tokens = len(engine.backend.tokenizer.encode(_REPLY)) + 1
        store = f"sqlite:///{folder / 'bridle.db'}"
        proxy = self._opened.enter_context(
            ProxyServer(ProxySettings(engine.base_url, store, tokenizer_dir=model))
        )
        self._reader = self._opened.enter_context(Reader(store))
        self._model, self._url = engine.model, proxy.base_url
        stack = Stack(engine.base_url, proxy.base_url)
        self._publisher = Publisher(
            self._opened.enter_context(stack.engine()),
            folder / "published",
            PolicyRecord("bench", 0, 0.0, path=str(model)),
            probes=default_probes(vocabulary_size(self._policy)),
            config=PublishConfig(pause_mode="keep", tolerance=math.inf),
            announce=stack.announce,
        )
        super().__enter__()
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._opened.close()

    async def _begin(self) -> None:
        self._control = Client(self._url)
        self._chat = AsyncOpenAI(api_key="of each session")

    async def _end(self) -> None:
        await super()._end()
        await self._control.__aexit__()
        await self._chat.close()

    def publish(self, version: int) -> None:
        self._publisher.publish(self._policy, version)

    async def lead(self, group: int, member: int, seconds: float) -> str:
        asked = SessionRequest(group_id=f"{group:06}")
        session = await self._control.create_session(asked)
        delay = seconds / (TURNS * self._tokens)
        messages: list[ChatCompletionMessageParam] = []
        chat = self._chat.with_options(base_url=session.base_urls["openai"], api_key=session.key)
        for _ in range(TURNS):
            messages.append({"role": "user", "content": f"pace {delay:.6f} seconds"})
            stream = await chat.chat.completions.create(
                model=self._model, messages=messages, stream=True
            )
            pieces = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            messages.append({"role": "assistant", "content": "".join(filter(None, pieces))})
        await self._control.reward(
            session.id, "reward", float(member), verifier_key=session.verifier_key
        )
        await self._control.seal(session.id, "completed")
        return session.id

    def load(self, session_id: str) -> Episode:
        return loaded_episode(self._reader, session_id, SampleRules())


def _reply(request: ScriptedRequest) -> ScriptedReply:
    """Reply at the pace that the last message asks for, in seconds a token; to a probe at once."""
    paces = _PACE.findall(request.prompt_text)
    return ScriptedReply(_REPLY, delay=float(paces[-1]) if paces else 0.0)
