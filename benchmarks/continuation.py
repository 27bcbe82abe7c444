"""A benchmark of exact continuation: time to prompt ids, and to the first token, of long sessions.

A made-up agent reads one source file after the other with a tool. Its conversation is recorded call
by call, as a proxy does it. At each context length the next request is turned into prompt ids in
two ways: by lineage, which tokenises the tail alone, and by rendering and tokenising the whole
history, as an engine does for a request with messages.

The time to the first token is measured at the client, through a proxy and without one, in turns, on
the same engine. Two engines are measured: the embedded one with a tiny random policy, which caches
prefixes, and a scripted one, which only renders and tokenises.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np
import orjson

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.embedded import EmbeddedEngine
from bridle.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply
from bridle.proxy.continuation.continuation import Continuer
from bridle.proxy.dialects.registry import CHAT
from bridle.proxy.server import ProxyServer
from bridle.proxy.session.session import Session
from bridle.proxy.settings import ProxySettings
from bridle.proxy.wire.canonical import Minted
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.store.records import CallStatus, Choice, Message, SessionRecord, ToolCall, new_id

CONTEXTS: Final = (8192, 32768, 131072)
FIRST_TOKEN_CONTEXT: Final = 32768
_RESULT_CHARACTERS: Final = 3000
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a part of a file of the workspace.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "offset": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
]
_MODEL: Final = "policy"
_VOCABULARY: Final = 8192
_TINY: Final = TinyShape(
    hidden=64, layers=1, heads=2, kv_heads=1, intermediate=128, context=1 << 17
)


def measure(
    contexts: Sequence[int] = CONTEXTS,
    *,
    first_token_context: int = FIRST_TOKEN_CONTEXT,
    rounds: int = 9,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Return medians over ``rounds`` in milliseconds; exact and rendered prompts take turns.

    ``tokenizer`` is a model directory whose tokenizer and template make the prompts. With it, no
    first token is timed, because no engine here serves that vocabulary.
    """
    if tokenizer is not None:
        return {"contexts": _prompt_times(Tokenizer(tokenizer), _texts(), contexts, rounds)}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        texts = _texts()
        train_tokenizer(model, texts[::4], vocab_size=_VOCABULARY)
        return {
            "contexts": _prompt_times(Tokenizer(model), texts, contexts, rounds),
            **_first_token_ratios(model, texts, first_token_context, rounds),
        }


def _texts() -> list[str]:
    """Return the sources of the standard library, in pieces as long as a tool's result."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    whole = "".join(path.read_text(errors="replace") for path in sources)[:2_000_000]
    return [whole[at : at + _RESULT_CHARACTERS] for at in range(0, len(whole), _RESULT_CHARACTERS)]


def _prompt_times(
    tokenizer: Tokenizer, texts: Sequence[str], contexts: Sequence[int], rounds: int
) -> dict[str, dict[str, float]]:
    agent = _Agent(tokenizer, texts)
    found: dict[str, dict[str, float]] = {}
    for context in sorted(contexts):
        while agent.tokens < context:
            agent.turn()
        bodies = agent.bodies(rounds + 1)
        exact, rendered = _in_turns(agent.exact, agent.rendered, bodies, time.process_time)
        whole = agent.rendered(bodies[-1])
        tail = agent.exact(bodies[-1])
        alone = _median(agent.exact, agent.bodies(rounds + 1), time.process_time)
        found[str(context)] = {
            "exact_ms": round(1000 * exact, 3),
            "rendered_ms": round(1000 * rendered, 3),
            "ratio": round(rendered / exact, 2),
            "json_ms": round(1000 * _median(orjson.loads, bodies[1:], time.process_time), 3),
            "exact_alone_ms": round(1000 * alone, 3),
            "prompt_tokens": len(whole),
            "tail_tokens": tail,
        }
    return found


class _Agent:
    """A conversation that grows by one file a turn, recorded as a proxy records it."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._continuer = Continuer(tokenizer)
        self._session = Session(SessionRecord(id="ses_bench", created_at=0.0))
        self._texts = cycle(texts)
        self.tokens = 0
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a careful engineer. Read before you write."},
            {"role": "user", "content": "Find out how the standard library opens files."},
        ]

    def body(self) -> bytes:
        return orjson.dumps({"model": _MODEL, "messages": self._messages, "tools": _TOOLS})

    def bodies(self, count: int) -> list[bytes]:
        """Return ``count`` next requests, each with a new tool result.

        Therefore nothing of the new turn has been seen before.
        """
        made = []
        for _ in range(count):
            self._messages[-1] = {**self._messages[-1], "content": next(self._texts)}
            made.append(self.body())
        return made

    def turn(self) -> None:
        """Make one call, and append its reply and the tool's result to the conversation."""
        request = CHAT.parse(self.body(), {}, {})
        link = self._session.find(request)
        prompt = self._continuer.prompt(link, request).token_ids
        if prompt is None:
            prompt = np.asarray(self.rendered(self.body()), dtype=np.uint32)
        call_id = new_id("call")
        reply = _reading(len(self._messages))
        called = Minted(call_id, 0, call_id, _MODEL).tool_call_id(0)
        call = ToolCall(called, "read_file", str(reply.tool_calls[0].arguments))
        said = Message("assistant", reply.content, reply.reasoning, (call,))
        message = msgspec.structs.replace(said, reasoning=None).to_chat()
        sampled = [*self._tokenizer.encode(reply.markup()), *self._tokenizer.eos_token_ids]
        ids = np.asarray(sampled, dtype=np.uint32)
        choice = Choice(ids, np.zeros(len(ids), dtype=np.float32), (), "tool_calls")
        growth, _ = self._session.grow(call_id, link, [choice], prompt)
        turn = self._session.turn(call_id, link, CallStatus.COMPLETE, [said], growth, len(prompt))
        self._session.add(turn)
        self._messages += [message, _result(called, next(self._texts))]
        self.tokens = len(prompt) + len(ids)

    def exact(self, body: bytes) -> int:
        """Continue a request exactly, from its bytes to its prompt ids.

        Return the number of new ids.
        """
        request = CHAT.parse(body, {}, {})
        prompt = self._continuer.prompt(self._session.find(request), request)
        if prompt.token_ids is None:
            raise RuntimeError(f"the call was not continued exactly: {prompt.break_reason}")
        return prompt.tail_token_count

    def rendered(self, body: bytes) -> list[int]:
        """Render and tokenise a whole request, from its bytes to its prompt ids."""
        asked = orjson.loads(body)
        return self._tokenizer.encode(self._tokenizer.render(asked["messages"], asked["tools"]))


def _reading(turn: int) -> ScriptedReply:
    """Return the reply that the agent samples: a thought, a sentence, and a call.

    The call's arguments are compact JSON.
    """
    return ScriptedReply(
        "Let me read on.",
        reasoning=f"Part {turn} may say how the descriptor is made; nothing so far did.",
        tool_calls=(ScriptedCall("read_file", f'{{"path":"lib.py","offset":{turn * 3000}}}'),),
    )


def _result(call: Any, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def _first_token_ratios(
    model: Path, texts: Sequence[str], context: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the time to the first token through the proxy as a ratio.

    It is divided by that of the same engine asked with messages.
    """
    script: Iterator[ScriptedReply] = (_reading(turn) for turn in cycle(range(1_000_000)))
    scripted = ScriptedEngine(
        model, lambda _: next(script), served_model_name=_MODEL, max_model_len=1 << 20
    )
    make_policy(model, _TINY, vocab_size=_VOCABULARY)
    embedded = EmbeddedEngine(model, served_model_name=_MODEL)
    session = _Session(model, texts, context, rounds)
    key = str(context)
    return {
        "ttft_ratio": {key: session.ratio(embedded, {"max_tokens": 8})},
        "ttft_ratio_scripted": {key: session.ratio(scripted, {"tools": _TOOLS})},
    }


@dataclass(frozen=True, slots=True)
class _Session:
    """A session that is led through the proxy up to a context length.

    From there on, the same requests go through the proxy and to the engine itself in turns.
    """

    model: Path
    texts: Sequence[str]
    context: int
    rounds: int

    def ratio(self, served: ScriptedEngine | EmbeddedEngine, fields: dict[str, Any]) -> float:
        store = self.model.parent / f"{type(served).__name__}.db"
        with (
            served as engine,
            ProxyServer(
                ProxySettings(engine.base_url, str(store), tokenizer_dir=self.model)
            ) as proxy,
            httpx.Client(timeout=120, trust_env=False) as client,
        ):
            through = f"{proxy.base_url}/s/bench/v1/chat/completions"
            direct = f"{engine.base_url}/v1/chat/completions"
            messages = self._grown(client, through, fields)
            requests = [
                [*messages[:-1], {**messages[-1], "content": self.texts[-number]}]
                for number in range(1, self.rounds + 2)
            ]
            first = _in_turns(
                lambda asked: _first_token(client, through, asked, fields),
                lambda asked: _first_token(client, direct, asked, fields),
                requests,
                time.perf_counter,
            )
            return round(first[0] / first[1], 3)

    def _grown(
        self, client: httpx.Client, url: str, fields: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Lead a session up to the context length, and return its messages."""
        messages = [{"role": "user", "content": "Find out how the standard library opens files."}]
        pieces, tokens = cycle(self.texts), 0
        while tokens < self.context:
            reply = client.post(url, json={"model": _MODEL, "messages": messages, **fields})
            reply.raise_for_status()
            message = reply.json()["choices"][0]["message"]
            tokens = reply.json()["usage"]["total_tokens"]
            calls = message.get("tool_calls")
            new = {"role": "user", "content": next(pieces)}
            messages += [message, _result(calls[0]["id"], new["content"]) if calls else new]
        return messages


def _first_token(
    client: httpx.Client, url: str, messages: Sequence[dict[str, Any]], fields: dict[str, Any]
) -> None:
    """Return when the first token has arrived.

    The rest of the stream is read outside the measured time.
    """
    body = {"model": _MODEL, "messages": messages, "stream": True, **fields}
    with client.stream("POST", url, json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            delta = line.startswith("data: {") and orjson.loads(line[6:])["choices"][0]["delta"]
            if delta and any(value for name, value in delta.items() if name != "role"):
                return


def _median(
    work: Callable[[Any], object], requests: Sequence[Any], clock: Callable[[], float]
) -> float:
    """Return the median seconds over ``requests``."""
    taken = []
    for request in requests:
        started = clock()
        work(request)
        taken.append(clock() - started)
    return statistics.median(taken)


def _in_turns(
    one: Callable[[Any], object],
    other: Callable[[Any], object],
    requests: Sequence[Any],
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Return the median seconds of each over ``requests``.

    The first request warms both up and does not count.
    """
    times: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    for request in requests:
        for work, taken in zip((one, other), times, strict=True):
            started = clock()
            work(request)
            taken.append(clock() - started)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])
