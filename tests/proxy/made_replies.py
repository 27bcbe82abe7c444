"""An engine's replies made up from a seed, as the bytes of its connection, with named defects."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 4096
DIALECTS = ("chat", "completions", "responses", "messages")

CONTRADICTIONS = (
    "id_missing",
    "id_twice",
    "id_beyond",
    "id_negative",
    "id_no_integer",
    "id_huge",
    "logprob_missing",
    "logprob_too_many",
    "logprob_positive",
    "prompt_missing",
    "prompt_empty",
    "prompt_beyond",
    "usage_prompt",
    "usage_sampled",
    "usage_missing",
    "choice_unasked",
    "choice_missing",
    "finish_unknown",
    "output_after_finish",
    "utf8",
    "json_cut",
    "error",
    "cut",
)
MISSING = ("logprob_unknown", "logprob_null", "logprob_nan")
"""A token without a logprob is recorded as such, and the reply is complete."""
COUNTS = {"id_missing", "id_twice", "logprob_missing", "logprob_too_many", "usage_sampled"}
"""The defects of which a reply has one at most: two may make up for each other."""
HARMLESS = ("crlf", "comments", "unknown_fields", "no_done", "split_data", "model_name", "escapes")
ONLY_STREAMED = {"output_after_finish", *HARMLESS} - {"unknown_fields", "model_name", "escapes"}
TEXTS = ("a", " word", "é", "…", "🙂", "\u2028", '"', "\\", "\n\n", "data: ", "\x00", "")


@dataclass
class Said:
    """A choice as the engine says it."""

    ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: str | None = "stop"


def _spoil_choice(said: Said, at: int, defect: str) -> None:
    ids = {"id_beyond": VOCABULARY, "id_negative": -1, "id_no_integer": "7", "id_huge": 2**32}
    scores = {"logprob_positive": 0.5, "logprob_unknown": -9999.0, "logprob_null": None}
    match defect:
        case "id_missing":
            del said.ids[at:]
        case "id_twice":
            said.ids.insert(at, 7)
        case "id_beyond" | "id_negative" | "id_no_integer" | "id_huge":
            said.ids[at:] = [ids[defect]]
        case "logprob_missing":
            said.logprobs.pop()
        case "logprob_too_many":
            said.logprobs += [-0.5, -0.5]
        case "logprob_positive" | "logprob_unknown" | "logprob_null":
            said.logprobs[0:1] = [scores[defect]]
        case "logprob_nan":
            said.logprobs[0:1] = [float("nan")]
        case "choice_missing":
            said.finish = None
        case "finish_unknown":
            said.finish = "gave up"


@dataclass
class Plan:
    """One reply, and the request that it is for."""

    dialect: str
    stream: bool
    defects: frozenset[str]
    rng: random.Random
    asked: int = 1
    prompt: list[Any] | None = None
    choices: list[Said] = field(default_factory=list)
    usage: dict[str, int] | None = None

    @classmethod
    def made(cls, seed: int, defects: frozenset[str]) -> Plan:
        rng = random.Random(seed)
        plan = cls(rng.choice(DIALECTS), rng.random() < 0.7, defects, rng)
        if not plan.stream:
            plan.defects -= ONLY_STREAMED
        if plan.dialect in ("chat", "completions"):
            plan.asked = rng.randint(1, 3)
        plan.prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 3, 400)))]
        for _ in range(plan.asked):
            count = rng.randint(1, 6)
            plan.choices.append(
                Said(
                    [rng.randrange(VOCABULARY) for _ in range(count)],
                    [-rng.random() * 9 for _ in range(count)],
                    [rng.choice(TEXTS) for _ in range(count)],
                    rng.choice(("stop", "length")),
                )
            )
        sampled = sum(len(choice.ids) for choice in plan.choices)
        plan.usage = {"prompt_tokens": len(plan.prompt), "completion_tokens": sampled}
        plan.defects -= frozenset(sorted(plan.defects & COUNTS)[1:])
        for defect in sorted(plan.defects):
            plan._spoil(defect)
        return plan

    @property
    def contradictory(self) -> bool:
        return bool(self.defects & set(CONTRADICTIONS))

    def _spoil(self, defect: str) -> None:
        said, rng = self.rng.choice(self.choices), self.rng
        at = rng.randrange(len(said.ids)) if said.ids else 0
        _spoil_choice(said, at, defect)
        match defect:
            case "prompt_missing":
                self.prompt = None
            case "prompt_empty":
                self.prompt = []
            case "prompt_beyond":
                self.prompt = [*(self.prompt or ()), VOCABULARY]
            case "usage_prompt" | "usage_sampled" if self.usage:
                name = "prompt_tokens" if defect == "usage_prompt" else "completion_tokens"
                self.usage = self.usage | {name: self.usage[name] + rng.choice((-1, 1, 1000))}
                self.usage[name] = max(0, self.usage[name])
            case "usage_missing":
                self.usage = None
            case "choice_unasked":
                self.choices.append(Said([5], [-1.0], ["x"]))

    # -- as bytes --------------------------------------------------------------------------------

    def reply(self) -> list[bytes]:
        """The reads that the transport makes."""
        data = self._streamed() if self.stream else self._whole()
        if "utf8" in self.defects:
            data = re.sub(rb'("(?:content|text)": ")', b"\\1\xff", data, count=1)
        if "json_cut" in self.defects:
            at = data.rindex(b"}")
            data = data[:at] + data[at + 1 :]
        if "cut" in self.defects:
            data = data[: self.rng.randrange(1, max(2, data.rfind(b"finish_reason")))]
        cuts = sorted(self.rng.randrange(len(data) + 1) for _ in range(self.rng.choice((0, 3, 40))))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if b > a]

    def _json(self, value: Mapping[str, Any]) -> bytes:
        if "unknown_fields" in self.defects:
            value = {"id": "x", "created": 1, "later": {"deep": [None]}, **value}
        if "model_name" in self.defects:
            value = {**value, "model": "other"}
        return json.dumps(value, ensure_ascii="escapes" in self.defects).encode()

    def _logprobs(self, values: list[Any], texts: list[str]) -> dict[str, Any]:
        if self.dialect == "completions":
            return {"token_logprobs": values, "tokens": texts}
        return {"content": [{"token": "t", "logprob": value} for value in values]}

    def _whole(self) -> bytes:
        choices = []
        for index, said in enumerate(self.choices):
            text = "".join(said.texts)
            shown = (
                {"text": text} if self.dialect == "completions" else {"message": {"content": text}}
            )
            choices.append(
                {
                    "index": index,
                    "token_ids": said.ids,
                    "logprobs": self._logprobs(said.logprobs, said.texts),
                    "finish_reason": said.finish,
                    **shown,
                }
            )
        body: dict[str, Any] = {"prompt_token_ids": self.prompt, "choices": choices}
        if self.usage is not None:
            body["usage"] = self.usage
        if "error" in self.defects:
            body["error"] = {"message": "out of memory"}
        return self._json(body)

    def _streamed(self) -> bytes:
        """Chunks of the choices in any order among each other."""
        queues = [self._chunks(index, said) for index, said in enumerate(self.choices)]
        chunks: list[dict[str, Any]] = []
        while any(queues):
            chunks.append({"choices": [self.rng.choice([one for one in queues if one]).pop(0)]})
        chunks[0]["prompt_token_ids"] = self.prompt
        if "output_after_finish" in self.defects:
            chunks.append({"choices": [{**self._said([7], [-0.5], ["!"]), "index": 0}]})
            self.choices[0].ids.append(7)
            self.choices[0].logprobs.append(-0.5)
        if "error" in self.defects:
            place = self.rng.randrange(len(chunks))
            chunks.insert(place, {"error": {"message": "out of memory"}})
        if self.usage is not None:
            chunks.append({"choices": [], "usage": self.usage})
        events = [self._event(self._json(chunk)) for chunk in chunks]
        if "no_done" not in self.defects:
            events.append(self._event(b"[DONE]"))
        return b"".join(events)

    def _event(self, payload: bytes) -> bytes:
        end = b"\r\n" if "crlf" in self.defects else b"\n"
        before = b": alive" + end + b"event: x" + end if "comments" in self.defects else b""
        if "split_data" in self.defects and payload.endswith(b"}"):
            payload = payload[:-1] + end + b"data:}"
        return before + b"data: " + payload + end + end

    def _chunks(self, index: int, said: Said) -> list[dict[str, Any]]:
        """Return the chunks of one choice: tokens in groups, the end with the last or by itself."""
        found: list[dict[str, Any]] = []
        at, longest = 0, max(len(said.ids), len(said.logprobs), len(said.texts))
        while at < longest:
            end = at + self.rng.randint(1, 3)
            given = (said.ids[at:end], said.logprobs[at:end], said.texts[at:end])
            found.append({**self._said(*given), "index": index})
            at = end
        if said.finish is not None:
            if self.rng.random() < 0.5:
                found.append({"index": index, "delta": {}})
            found[-1]["finish_reason"] = said.finish
        return found

    def _said(self, ids: list[Any], logprobs: list[Any], texts: list[str]) -> dict[str, Any]:
        text = "".join(texts)
        shown: dict[str, Any] = {"delta": {"content": text}}
        if self.dialect == "completions":
            shown = {"text": text}
        return {"token_ids": ids, "logprobs": self._logprobs(logprobs, texts), **shown}
