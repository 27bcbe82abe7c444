"""An engine whose replies come from a Python function: the contract without a model.

It serves scripted teachers and all tests of the components in front of an engine. Replies are
tokenised with a real model directory's tokenizer and emitted token by token. The script is certain
of its replies, so every token's logprob is 0.0 unless the script sets another. It needs no torch.

    def script(request: ScriptedRequest) -> ScriptedReply | str:
        if request.messages[-1]["role"] == "user":
            return ScriptedReply(tool_calls=(ScriptedCall("add", {"a": 1, "b": 2}),))
        return "The sum is 3."

    with ScriptedEngine(model_dir, script) as engine:
        ...  # engine.base_url
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from bridle.engine.contract.contract import ModelCard, PauseMode
from bridle.engine.contract.errors import ConnectionCut, RequestRefused
from bridle.engine.contract.markup import THINK, end_of_turn
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.backend import (
    Prompt,
    PromptLogprob,
    SampledToken,
    SamplingParams,
    Step,
)
from bridle.engine.serve.markup import hermes
from bridle.engine.serve.server import make_app
from bridle.engine.serve.transport import ServerThread


@dataclass(frozen=True)
class ScriptedRequest:
    """The parts of a request that a script sees."""

    messages: Sequence[Mapping[str, Any]]
    """The request's chat messages, as they came; empty for text completions."""
    tools: Sequence[Mapping[str, Any]]
    prompt_ids: Sequence[int]
    """The prompt's ids: those that were given (exact continuation), else those of the rendered
    messages."""
    sampling: SamplingParams
    tokenizer: Tokenizer = field(repr=False)

    @cached_property
    def prompt_text(self) -> str:
        return self.tokenizer.decode(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """A function call in a scripted reply."""

    name: str
    arguments: Mapping[str, Any] | str
    """An object, or its JSON text, which is written verbatim, also if it is malformed."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with an HTTP error in the contract's shape."""

    status: int = 500
    message: str = "The engine was told to fail."
    kind: str = "InternalServerError"


@dataclass(frozen=True, slots=True)
class Cut:
    """Drop the connection after ``after_tokens`` tokens, with no end of stream."""

    after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """Send an error event after ``after_tokens`` tokens, then ``[DONE]``.

    If not streaming, answer with an HTTP error.
    """

    after_tokens: int = 0
    message: str = "The engine failed in mid-stream."


@dataclass(frozen=True, slots=True)
class Stall:
    """Send nothing for ``seconds`` after ``after_tokens`` tokens, or until ``over`` is set.

    Then go on.
    """

    seconds: float
    after_tokens: int = 0
    over: threading.Event | None = None


Fault = Refuse | Cut | Fail | Stall


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """A reply in parts. It is written in Hermes markup, with reasoning in ``<think>`` first."""

    content: str = ""
    reasoning: str | None = None
    tool_calls: Sequence[ScriptedCall] = ()
    fault: Fault | None = None
    delay: float = 0.0
    """Seconds before each token."""
    logprob: float = 0.0
    """The logprob of every token; ``contract.MISSING_LOGPROB`` plays an engine that lost them."""
    end: bool = True
    """True if the model ends its turn after the text; if not, the reply ends with ``length``."""

    def markup(self) -> str:
        """Return the text that the policy would have sampled."""
        parts = []
        if self.reasoning is not None:
            parts.append(f"{THINK.opening}\n{self.reasoning}\n{THINK.closing}\n\n")
        if self.content:
            parts.append(self.content)
        for index, call in enumerate(self.tool_calls):
            arguments = call.arguments
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            body = f'{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}'
            gap = "\n" if index or self.content else ""
            parts.append(f"{gap}{hermes.OPEN}\n{body}\n{hermes.CLOSE}")
        return "".join(parts)


Script = Callable[[ScriptedRequest], ScriptedReply | str | Fault]
"""A function that answers requests. It is called once per sequence, on the server's event loop, and
must not block. A string is a reply's text in the model's own markup; a fault alone is an empty
reply with that fault."""


class ScriptedBackend:
    """A backend that plays a script as if it were a policy."""

    samples = False

    def __init__(
        self,
        model_dir: str | Path,
        script: Script,
        *,
        served_model_name: str | None = None,
        max_model_len: int = 32768,
    ) -> None:
        directory = Path(model_dir)
        self.tokenizer = Tokenizer(directory)
        self.card = ModelCard(served_model_name or directory.name, max_model_len, str(directory))
        self.vocab_size = int(self.tokenizer.backend.get_vocab_size())
        self.policy_version = 0
        self.weights_fingerprint = str(directory.absolute())
        """The directory whose weights it pretends to serve."""
        self.requests: list[ScriptedRequest] = []
        """Every request that the script was given, in order."""
        self._script = script
        self._ends: dict[bool, int] = {}
        """The id that ends a turn, by whether the turn has called a tool."""
        self._running = 0
        self._idle = asyncio.Condition()
        self._admits = asyncio.Event()
        self._emits = asyncio.Event()
        self._admits.set()
        self._emits.set()
        self._aborts = 0
        """A number that grows with every aborting pause; replies begun before it end."""

    @property
    def healthy(self) -> bool:
        return True

    @property
    def running(self) -> int:
        """Number of replies that run now."""
        return self._running

    @property
    def paused(self) -> bool:
        return not self._admits.is_set()

    async def generate(self, prompt: Prompt, sampling: SamplingParams) -> AsyncGenerator[Step]:
        request = ScriptedRequest(
            prompt.messages, prompt.tools, prompt.token_ids, sampling, self.tokenizer
        )
        self.requests.append(request)
        answer = self._script(request)
        if isinstance(answer, Refuse):
            raise RequestRefused(answer.message, status=answer.status, kind=answer.kind)
        if isinstance(answer, str):
            answer = ScriptedReply(answer)
        elif not isinstance(answer, ScriptedReply):
            answer = ScriptedReply(fault=answer)
        if isinstance(answer.fault, Refuse):
            fault = answer.fault
            raise RequestRefused(fault.message, status=fault.status, kind=fault.kind)
        return self._steps(answer, prompt, sampling)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._admits.clear()
        if mode == "keep":
            self._emits.clear()
            return
        self._emits.set()
        if mode == "abort":
            self._aborts += 1
        async with self._idle:
            await self._idle.wait_for(lambda: self._running == 0)

    async def resume(self) -> None:
        self._emits.set()
        self._admits.set()

    async def reload_weights(self, directory: str) -> None:
        if not await asyncio.to_thread(Path(directory).is_dir):
            raise RequestRefused(f"{directory} is not a directory", param="weights_path")
        self.policy_version += 1
        self.weights_fingerprint = directory

    async def reset_prefix_cache(self) -> None:
        """Do nothing, because a script has no cache."""

    async def _steps(
        self, reply: ScriptedReply, prompt: Prompt, sampling: SamplingParams
    ) -> AsyncGenerator[Step]:
        await self._admits.wait()
        self._running += 1
        aborts = self._aborts
        try:
            ids = self._sampled_ids(reply, sampling)
            limit = min(len(ids), sampling.max_tokens)
            step = Step(prompt_logprobs=_certain(prompt.token_ids, sampling))
            for position, token_id in enumerate(ids[:limit]):
                await _play(reply, position)
                await self._emits.wait()
                if self._aborts != aborts:
                    yield Step(finish="abort")
                    return
                step.tokens.append(SampledToken(token_id, reply.logprob))
                if token_id in self._stop_ids(sampling):
                    step.finish = "stop"
                    own = token_id in self.tokenizer.eos_token_ids
                    step.stop_token = None if own else token_id
                elif position + 1 == limit:
                    step.finish = "length"
                yield step
                if step.finish is not None:
                    return
                step = Step()
            await _play(reply, limit)
            step.finish = "length"
            yield step
        finally:
            self._running -= 1
            async with self._idle:
                self._idle.notify_all()

    def _sampled_ids(self, reply: ScriptedReply, sampling: SamplingParams) -> list[int]:
        ids = self.tokenizer.encode(reply.markup())
        if reply.end:
            ids += [self._end(called=bool(reply.tool_calls))]
        return ids

    def _end(self, *, called: bool) -> int:
        """Return the id that ends a turn: the template's, else the tokenizer's own."""
        if called not in self._ends:
            end = end_of_turn(self.tokenizer, called=called)
            if end is None:
                token = self.tokenizer.special_tokens.get("eos_token")
                end = self.tokenizer.token_id(token) if token else None
            if end is None:
                raise RequestRefused(
                    f"{self.tokenizer.directory} does not say how a turn ends: "
                    "name an eos_token in tokenizer_config.json"
                )
            self._ends[called] = end
        return self._ends[called]

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset() if sampling.ignore_eos else self.tokenizer.eos_token_ids
        return own | sampling.stop_token_ids


class ScriptedEngine:
    """A scripted engine served from a thread while the context is open."""

    def __init__(
        self,
        model_dir: str | Path,
        script: Script,
        *,
        served_model_name: str | None = None,
        max_model_len: int = 32768,
        parse_thinking: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.backend = ScriptedBackend(
            model_dir, script, served_model_name=served_model_name, max_model_len=max_model_len
        )
        app = make_app(self.backend, parse_thinking=parse_thinking)
        self._server = ServerThread(app, host=host, port=port)

    @property
    def base_url(self) -> str:
        return self._server.base_url

    @property
    def model(self) -> str:
        return self.backend.card.id

    @property
    def requests(self) -> list[ScriptedRequest]:
        return self.backend.requests

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()


async def _play(reply: ScriptedReply, position: int) -> None:
    """Play the delay and the fault, if any, before the token at ``position``."""
    if reply.delay:
        await asyncio.sleep(reply.delay)
    match reply.fault:
        case Cut(after_tokens) if after_tokens == position:
            raise ConnectionCut
        case Fail(after_tokens, message) if after_tokens == position:
            raise RequestRefused(message, status=500, kind="InternalServerError")
        case Stall(seconds, after_tokens, over) if after_tokens == position:
            await (asyncio.to_thread(over.wait, seconds) if over else asyncio.sleep(seconds))


def _certain(ids: Sequence[int], sampling: SamplingParams) -> list[PromptLogprob | None] | None:
    """Return the prompt logprobs of a script, which finds every prompt certain."""
    if sampling.prompt_logprobs is None:
        return None
    return [None, *(PromptLogprob(token_id, 0.0, 1) for token_id in ids[1:])]
