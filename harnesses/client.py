"""The proxy's control API, as a rollout uses it: create a session, reward it, seal it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec

from bridle.errors import BridleError
from bridle.harnesses.given import GivenRewards
from bridle.harnesses.guards import Action
from bridle.harnesses.tasks.task import Task
from bridle.store.records import StartFacts
from bridle.store.reward import FindingMode, Reward, RewardKind, RewardSource

_CALLS_AT_ONCE: Final = 200
_lines: Final = msgspec.json.Decoder(dict[str, Any])
Answer = TypeVar("Answer")


class ControlError(BridleError):
    """The proxy refused a control request, or another kind of server answered it."""

    def __init__(self, status: int, message: str) -> None:
        if status in (401, 403):
            message = "it requires its admin key; set BRIDLE_ADMIN_KEY or give --key"
        super().__init__(f"the proxy answered {status}: {message}")
        self.status = status


class ProxyUnreachable(BridleError, ConnectionError):
    """The proxy does not answer, or answers with an unreadable reply or a 5xx status."""

    retryable = True


class ProxySilent(ProxyUnreachable):
    """Nothing answers: there may be no proxy at that address."""


class Session(msgspec.Struct, frozen=True):
    """A recorded session as the proxy returns it. Its keys are shown only here, once."""

    id: str
    key: str
    """The harness's key, which records calls of the session."""
    base_urls: dict[str, str]
    """The ``openai``, ``anthropic`` and ``google`` base URLs of this session."""
    environment: dict[str, str] = {}
    """The variables for a harness that takes its base URL and key from the environment."""
    verifier_key: str = ""
    """The key for the code that scores the session. An adapter never sees it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The recorded session that a new one re-enters."""

    session: str
    call: str | None = None
    """The id of the recorded call at which it goes on live; ``None`` for after the last one."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The fields with which a session is created. All are optional."""

    name: str | None = None
    run_id: str | None = None
    group_id: str | None = None
    harness: str | None = None
    continuation: str | None = None
    """``exact`` or ``rendered``, or ``None`` for the proxy's default."""
    settings: Mapping[str, Any] | None = None
    labels: Mapping[str, Any] | None = None
    ttl_s: float | None = None
    task: Task | None = None
    start: StartFacts | None = None
    """The start of the harness, if it is known."""
    origin: Origin | None = None
    """The recorded session that the session re-enters."""

    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "name": self.name,
            "run_id": self.run_id,
            "group_id": self.group_id,
            "harness": self.harness,
            "continuation": self.continuation,
            "settings": dict(self.settings) if self.settings is not None else None,
            "labels": dict(self.labels) if self.labels is not None else None,
            "ttl_s": self.ttl_s,
            "start": None if self.start is None else vars(self.start),
            "origin": None if self.origin is None else asdict(self.origin),
        }
        if self.task is not None:
            fields["task"] = {
                "id": self.task.id,
                "suite": self.task.suite,
                "split": self.task.split,
                "payload": dict(self.task.payload),
            }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class FeedLease:
    """Sessions that the proxy leases to one consumer, to be trained."""

    id: str
    consumer: str
    sessions: Sequence[dict[str, Any]]
    """A line of the feed for each session: its facts, ``rewards`` and ``samples``."""


class Client:
    """Control requests to one proxy. Use it as an async context manager."""

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        timeout_s: float = 30.0,
        given: GivenRewards | None = None,
    ) -> None:
        """Connect to the proxy at ``base_url``.

        A ``/v1`` at its end, as SDKs need it, is left out. ``given`` records the sessions that are
        created here, and the verifier's rewards.
        """
        self._given = given
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # The machine's HTTP proxy settings must not come between us and our own proxy.
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1") + "/bridle/v1",
            headers=headers,
            timeout=timeout_s,
            transport=httpx.AsyncHTTPTransport(retries=2),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def put_run(
        self,
        run_id: str,
        kind: str,
        *,
        name: str | None = None,
        status: str = "running",
        reason: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a run with the settings ``config``, to which sessions then refer by its id.

        For a run that has begun, set how it ended and, in one line, the reason.
        """
        more = {"name": name, "reason": reason, "config": config}
        body = {"kind": kind, "status": status, **{k: v for k, v in more.items() if v}}
        await self._send("PUT", f"/runs/{run_id}", body)

    async def run(self, run_id: str) -> dict[str, Any]:
        """Return a run, with its settings as ``config``."""
        return _read(await self._send("GET", f"/runs/{run_id}"), dict[str, Any])

    async def create_session(self, request: SessionRequest) -> Session:
        made = _read(await self._send("POST", "/sessions", request.body()), Session)
        if self._given is not None:
            self._given.begin(made.id)
        return made

    async def new_verifier_key(self, session_id: str) -> str:
        """Return a new verifier key for a session whose own key is lost.

        The old key is void from then on.
        """
        reply = await self._send("POST", f"/sessions/{session_id}/verifier-key")
        return _read(reply, dict[str, str])["verifier_key"]

    async def private_files(self) -> list[Path]:
        """Return the files of the proxy's machine that no session may see."""
        reply = await self._send("GET", "/private-files")
        return [Path(path) for path in _read(reply, dict[str, list[str]])["paths"]]

    async def reward(
        self,
        session_id: str,
        name: str,
        value: float,
        *,
        verifier_key: str | None = None,
        kind: RewardKind = RewardKind.SCORE,
        mode: FindingMode | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a reward: the verifier's if ``verifier_key`` is given, else the operator's.

        With the ``kind`` ``finding`` it reports something about the session, and ``mode`` is what
        the finding costs.
        """
        source = RewardSource.VERIFIER if verifier_key else RewardSource.OPERATOR
        reward = Reward(
            session_id,
            name,
            value,
            created_at=0.0,
            source=source,
            kind=kind,
            mode=mode,
            detail=dict(detail or {}),
        )
        await self.give(reward, verifier_key=verifier_key)

    async def give(self, reward: Reward, *, verifier_key: str | None = None) -> None:
        """Record a reward at its place.

        Its source is the verifier's or a scorer's if ``verifier_key`` is given, else the
        operator's.
        """
        names = ("name", "value", "kind", "mode", "role", "branch", "call_id", "turn", "detail")
        facts = {name: getattr(reward, name) for name in names}
        body = {name: value for name, value in facts.items() if value not in (None, {})}
        if verifier_key:
            if reward.source is RewardSource.SCORER:
                body["scorer"] = True
            if self._given is not None:
                self._given.add(reward)
        at = f"/sessions/{reward.session_id}/rewards"
        await self._send("POST", at, body, key=verifier_key)

    async def seal(
        self,
        session_id: str,
        outcome: str,
        seconds: Mapping[str, float] | None = None,
        start: StartFacts | None = None,
    ) -> None:
        """End the session.

        ``seconds`` by stage become its label ``seconds``. ``start`` is how its harness was started,
        if the session was created before that was known.
        """
        body: dict[str, Any] = {"outcome": outcome}
        if seconds:
            body["seconds"] = dict(seconds)
        if start is not None:
            body["start"] = vars(start)
        await self._send("POST", f"/sessions/{session_id}/seal", body)

    async def session(self, session_id: str) -> dict[str, Any]:
        """Return a session's state.

        ``calls`` is the number of its calls by status. ``fault`` is the reason why the engine or
        the proxy may have made its agent fail.
        """
        return _read(await self._send("GET", f"/sessions/{session_id}"), dict[str, Any])

    async def rewards(self, session_id: str) -> list[Reward]:
        """Return the rewards and findings of a session, the oldest first."""
        found = await self._send("GET", f"/sessions/{session_id}/rewards")
        return _read(found, list[Reward])

    async def first_calls(self, session_id: str) -> list[dict[str, Any]]:
        """Return the session's first calls, up to a hundred, as the API shows them."""
        found = await self._send("GET", f"/sessions/{session_id}/calls")
        return _read(found, list[dict[str, Any]])

    async def actions(self, session_id: str) -> list[Action]:
        """Return the tool calls that a session's calls sampled."""
        return _read(await self._send("GET", f"/sessions/{session_id}/actions"), list[Action])

    async def calls(self, session_id: str) -> list[dict[str, Any]]:
        """Return all calls of a session, in the order of their start, with their messages."""
        found: list[dict[str, Any]] = []
        while True:
            at = f"/sessions/{session_id}/calls?first={len(found) + 1}&limit={_CALLS_AT_ONCE}"
            page = _read(await self._send("GET", at), list[dict[str, Any]])
            found += page
            if len(page) < _CALLS_AT_ONCE:
                return found

    async def set_kind(self, session_id: str, call_id: str, kind: str, by: str) -> None:
        """Set the purpose of a call; ``by`` names the program that decided."""
        body = {"kind": kind, "by": by}
        await self._send("PUT", f"/sessions/{session_id}/calls/{call_id}/kind", body)

    async def policy(self) -> dict[str, Any]:
        """Return the state of the policy, with its ``version``."""
        return _read(await self._send("GET", "/policy"), dict[str, Any])

    async def engines(self) -> list[dict[str, Any]]:
        """Return the state of each engine of the policy."""
        return _read(await self._send("GET", "/engines"), list[dict[str, Any]])

    async def lease(
        self,
        consumer: str,
        limit: int = 8,
        lease_s: float = 600.0,
        *,
        builder: str = "tree",
        rewarded: bool = False,
        run: str | None = None,
        facts: bool = False,
    ) -> FeedLease | None:
        """Lease at most ``limit`` sealed sessions of the feed for ``lease_s`` seconds.

        ``consumer`` is a name of your choice; it gets each session again until it acknowledges it.
        ``builder`` makes the samples: ``tree``, ``merged`` or ``per_call``. With ``rewarded``, a
        session waits for its first reward that counts. ``run`` takes the sessions of one run. With
        ``facts``, samples have what the engine reported of each token.
        Return ``None`` if there are none now.

        Raise :class:`ControlError` if the proxy refuses, and :class:`ProxyUnreachable`.
        """
        query: dict[str, Any] = {"limit": limit, "lease_s": lease_s, "builder": builder}
        query |= {"rewarded": str(rewarded).lower(), "facts": str(facts).lower()}
        if run is not None:
            query["run"] = run
        reply = await self._send("POST", f"/trajectories/{consumer}/lease?{urlencode(query)}")
        if reply.status_code == 204:
            return None
        try:
            sessions = _lines.decode_lines(reply.content)
            return FeedLease(reply.headers["x-bridle-lease"], consumer, sessions)
        except (msgspec.DecodeError, KeyError) as error:
            raise ControlError(reply.status_code, f"not as Bridle does ({error})") from error

    async def acknowledge(self, lease: FeedLease) -> None:
        """Report that the lease's sessions are trained, so that no lease has them again.

        Raise :class:`ControlError` if the lease has run out.
        """
        await self._send("POST", f"/trajectories/{lease.consumer}/leases/{lease.id}/ack")

    async def release(self, lease: FeedLease) -> None:
        """Give the lease's sessions back at once.

        Raise :class:`ControlError` if the lease has run out.
        """
        await self._send("DELETE", f"/trajectories/{lease.consumer}/leases/{lease.id}")

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            reply = await self._http.request(method, path, json=body, headers=headers)
        except httpx.DecodingError as error:
            base = self._http.base_url
            raise ProxyUnreachable(f"what {base} answered cannot be read: {error}") from error
        except httpx.TransportError as error:
            raise ProxySilent(
                f"no answer from {self._http.base_url}: {str(error) or type(error).__name__}. "
                "Is `bridle proxy` running?"
            ) from error
        if reply.status_code >= 500:
            raise ProxyUnreachable(f"the proxy answered {reply.status_code}: {reply.text[:300]}")
        if not reply.is_success:
            raise ControlError(reply.status_code, self._reason(reply))
        return reply

    def _reason(self, reply: httpx.Response) -> str:
        """Return the message of an error reply if Bridle sent it, else what to do about it."""
        try:
            return str(msgspec.json.decode(reply.content)["error"]["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            root = str(self._http.base_url).removesuffix("/bridle/v1/")
            said = " ".join(reply.text[:200].split())
            return (
                f"{said} ({root} is no Bridle proxy: name the address that `bridle proxy` prints)"
            )


def _read(reply: httpx.Response, kind: type[Answer]) -> Answer:
    """Return the reply's body.

    Raise :class:`ControlError` for a body that no Bridle proxy sends, because another web server
    may run at that address.
    """
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except msgspec.DecodeError as error:
        raise ControlError(reply.status_code, f"not as Bridle does ({error})") from error
