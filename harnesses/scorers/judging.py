"""A model that judges, asked through the proxy: recorded, untrainable, budgeted, cached."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from bridle.errors import BridleError
from bridle.harnesses.client import Client, Session, SessionRequest
from bridle.harnesses.verifiers.delivery import NoVerdict, VerifierError

JUDGES: Final = "judges"
"""The label of a judge's session with the id of the session that it judges."""
_TIMEOUT_S: Final = 600.0


class Judging:
    """The judgements of one run.

    Each is a session of its own, of no run, whose calls are of the kind ``side``: they are recorded
    and never trained. Equal questions to one model are asked once. Without ``most`` there is no
    budget. ``counts`` counts the judgements that were ``asked`` of a model, and the ``cached`` ones
    that an equal earlier one answered.
    """

    def __init__(self, client: Client, most: int | None, counts: Counter[str]) -> None:
        self._asked_here = 0
        self._counts = counts
        self._client = client
        self._most = most
        self._replies: dict[str, str] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def ask(
        self, judged: str, model: str, messages: Sequence[Mapping[str, Any]], tokens: int
    ) -> str:
        """Return the reply of ``model``, as a judgement of the session ``judged``.

        Raise :class:`NoVerdict` when the budget is used up, and :class:`VerifierError` if the model
        gives no reply.
        """
        content = json.dumps([model, list(messages), tokens], sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(content.encode()).hexdigest()
        async with self._asking.setdefault(digest, asyncio.Lock()):
            if digest in self._replies:
                self._counts["cached"] += 1
                return self._replies[digest]
            if self._most is not None and self._asked_here >= self._most:
                most = self._most
                raise NoVerdict(f"the budget of {most} judgements is used up (scorers.judgements)")
            self._asked_here += 1
            self._counts["asked"] += 1
            reply = await self._asked(judged, model, messages, tokens)
            self._replies[digest] = reply
            return reply

    async def _asked(
        self, judged: str, model: str, messages: Sequence[Mapping[str, Any]], tokens: int
    ) -> str:
        budget = {"budget": {"calls": 1, "tokens": tokens}}
        try:
            session = await self._client.create_session(
                SessionRequest(labels={JUDGES: judged}, settings=budget)
            )
            try:
                return await _complete(session, model, messages, tokens)
            finally:
                await self._set_aside(session)
        except (BridleError, httpx.HTTPError) as error:
            raise VerifierError(f"the judge {model} gave no reply: {error}") from error

    async def _set_aside(self, session: Session) -> None:
        """Mark the judge's calls as side calls, and seal its session."""
        for call in await self._client.calls(session.id):
            await self._client.set_kind(session.id, call["id"], "side", "judge")
        await self._client.seal(session.id, "completed")


async def _complete(
    session: Session, model: str, messages: Sequence[Mapping[str, Any]], tokens: int
) -> str:
    body = {"model": model, "messages": list(messages), "max_tokens": tokens, "temperature": 0}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:
        reply = await http.post(
            f"{session.base_urls['openai']}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {session.key}"},
        )
    if not reply.is_success:
        raise VerifierError(f"the proxy answered {reply.status_code}: {reply.text[:300]}")
    content = reply.json()["choices"][0]["message"].get("content")
    return content if isinstance(content, str) else ""
