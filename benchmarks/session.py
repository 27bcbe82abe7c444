"""A coding agent's session as the proxy records it, with only the sockets left out.

It has real text, a real vocabulary, and the proxy's own dialect, lineage and recorder.

Every turn the policy writes a sentence and calls a tool (150 tokens), and the tool prints 450
tokens of source code. Each request sends the whole history again, over a streaming chat dialect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bridle.bench.corpus import Corpus
from bridle.proxy.continuation.prompt import CallPrompt
from bridle.proxy.dialects.registry import DIALECTS
from bridle.proxy.recording.recorder import Recording, begun_call
from bridle.proxy.session.session import Session
from bridle.proxy.wire.canonical import (
    Event,
    Finished,
    Started,
    TextDelta,
    Tokens,
    ToolCallDelta,
    Usage,
)
from bridle.store.call import CallBegun, CallEnded, EndedFacts
from bridle.store.records import CallStatus, SessionRecord, TokenIds, new_id

SAMPLED: Final = 150
OBSERVED: Final = 450

_OUTCOME: Final = EndedFacts(
    status=CallStatus.COMPLETE,
    sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 8192},
    model_served="policy",
)

_SAID: Final = 90
"""Number of sampled tokens of prose; the others are the tool call's."""

_SYSTEM_TOKENS: Final = 1200

_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()} in the workspace.",
            "parameters": {
                "type": "object",
                "properties": {
                    field: {"type": "string", "description": f"The {field} to use."}
                    for field in fields
                },
                "required": list(fields),
            },
        },
    }
    for name, fields in {
        "run_shell_command": ("command", "directory"),
        "read_file": ("path", "offset", "limit"),
        "write_file": ("path", "content"),
        "replace": ("path", "old_string", "new_string"),
        "search_text": ("pattern", "path", "glob"),
        "list_folder": ("path",),
    }.items()
]


@dataclass(frozen=True, slots=True)
class BenchCall:
    """One call, ready for the writer."""

    begun: CallBegun
    ended: CallEnded


def session_record(name: str) -> SessionRecord:
    return SessionRecord(id=new_id("session"), created_at=time.time(), name=name, harness="bench")


class Agent:
    """The calls of one session, turn by turn."""

    def __init__(self, corpus: Corpus, session: SessionRecord, seed: int) -> None:
        self.session = session
        self._corpus = corpus
        self._random = np.random.default_rng(seed)
        self._code = int(self._random.integers(len(corpus.code)))
        self._prose = int(self._random.integers(len(corpus.prose)))
        self._held = Session(session)
        system, text = self._observe(_SYSTEM_TOKENS)
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": text},
            {"role": "user", "content": self._take_prose(60)[1]},
        ]
        self._prompt: TokenIds = np.concatenate([system, corpus.encode(json.dumps(_TOOLS))])

    def calls(self, turns: int) -> Iterator[BenchCall]:
        for _ in range(turns):
            yield self._call()

    def _call(self) -> BenchCall:
        dialect = DIALECTS.get("chat")
        body = {
            "model": "policy",
            "messages": self._messages,
            "tools": _TOOLS,
            "tool_choice": "auto",
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        request = dialect.parse(data, {}, {})
        link = self._held.find(request)
        now = time.time()
        headers = {"user-agent": "bench/1.0", "x-session-id": self.session.id}
        begun = begun_call(self.session.id, request, data, headers, now, link)
        minted = dialect.mint(begun.id, int(now), "policy")
        prompt = CallPrompt(self._prompt)
        recording = Recording(begun, self._held, request, link, prompt)
        emitter = dialect.emitter(request, minted)
        recording.sent(emitter.begin())
        for event in self._reply(minted.tool_call_id(0)):
            recording.fold.take([event])
            if piece := emitter.event(event):
                recording.sent(piece)
        recording.sent(emitter.end())
        ended, turn = recording.ended(_OUTCOME)
        self._held.add(turn)
        self._grow(ended)
        return BenchCall(begun, ended)

    def _reply(self, tool_call_id: str) -> Iterator[Event]:
        said, _ = self._take_prose(_SAID)
        called = self._take_code(SAMPLED - _SAID - 1)[0]
        stop = np.array([1], dtype=np.uint32)
        logprobs = self._logprobs(SAMPLED)
        ids = np.concatenate([said, called, stop])
        yield Started(prompt_tokens=len(self._prompt), prompt_token_ids=self._prompt.tolist())
        for token, piece, logprob in zip(said, self._corpus.pieces(said), logprobs, strict=False):
            yield Tokens([int(token)], [float(logprob)])
            if piece:
                yield TextDelta(piece)
        yield ToolCallDelta(0, id=tool_call_id, name="run_shell_command")
        yield ToolCallDelta(0, arguments='{"command": "')
        for token, piece, logprob in zip(
            called, self._corpus.pieces(called), logprobs[len(said) :], strict=False
        ):
            yield Tokens([int(token)], [float(logprob)])
            if piece:
                yield ToolCallDelta(0, arguments=json.dumps(piece)[1:-1])
        yield ToolCallDelta(0, arguments='"}')
        yield Tokens([1], [float(logprobs[-1])])
        yield Finished("tool_calls")
        yield Usage(prompt_tokens=len(self._prompt), completion_tokens=len(ids))

    def _grow(self, ended: CallEnded) -> None:
        """Append the reply and the tool's result to the history."""
        message = ended.replies[0].to_chat()
        ids, text = self._observe(OBSERVED)
        self._messages.append(message)
        answered = message["tool_calls"][0]["id"]
        self._messages.append({"role": "tool", "tool_call_id": answered, "content": text})
        self._prompt = np.concatenate([self._prompt, ended.choices[0].token_ids, ids])

    def _observe(self, tokens: int) -> tuple[TokenIds, str]:
        return self._take_code(tokens)

    def _take_code(self, tokens: int) -> tuple[TokenIds, str]:
        self._code, ids, text = self._take(self._corpus.code, self._code, tokens)
        return ids, text

    def _take_prose(self, tokens: int) -> tuple[TokenIds, str]:
        self._prose, ids, text = self._take(self._corpus.prose, self._prose, tokens)
        return ids, text

    def _take(self, source: str, at: int, tokens: int) -> tuple[int, TokenIds, str]:
        """Return the new position, and the next ``tokens`` tokens of ``source`` with their text.

        The source starts over at its end.
        """
        piece = source[at : at + 12 * tokens]
        if len(piece) < 12 * tokens:
            piece += source[: 12 * tokens - len(piece)]
        ids = self._corpus.encode(piece)[:tokens]
        text = self._corpus.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return (at + len(text)) % len(source), ids, text

    def _logprobs(self, count: int) -> list[float]:
        """Return logprobs like those of a policy that is sure of most tokens.

        They use every mantissa bit.
        """
        sure = -np.exp(self._random.normal(-3.5, 2.5, count))
        return [float(value) for value in sure.astype(np.float32)]
