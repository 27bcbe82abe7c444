"""A verifiers environment: questions after capitals, with an agent of its own that asks once.

The last task's reward cannot be computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

CITIES = {"France": "Paris", "Norway": "Oslo", "Atlantis": ""}


class Question(vf.TaskData):
    answer: str


class Capital(vf.Task[Question, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if not self.data.answer:
            raise ValueError(f"nobody knows the capital of {self.data.name}")
        return float(self.data.answer in trace.last_reply)


class Capitals(vf.Taskset[Capital, vf.TasksetConfig]):
    def load(self) -> Iterator[Capital]:
        for country, city in CITIES.items():
            prompt = f"What is the capital of {country}?"
            yield Capital(Question(name=country, prompt=prompt, answer=city), self.config.task)


class Ask(vf.Harness[vf.HarnessConfig]):
    """Sends the prompt as an OpenAI client would."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> Any:
        _, prompt = self.resolve_text_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(0 if reply.is_success else 1, reply.text, "")


__all__ = ["Ask", "Capitals"]
