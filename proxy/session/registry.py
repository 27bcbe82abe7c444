"""Authentication and admission: the rights of a request, and the session that it belongs to.

A session key records calls of its session, a verifier key scores and seals one session, and the
admin key permits everything. A proxy with an admin key asks for a key on loopback too. With
``keyless_recording``, a loopback request without a key may record. Its session is found by path, by
the harness's own session id or by the conversation that it continues; otherwise a new one is
opened. A session that has a key stays closed to such a request, and so does the control API.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import msgspec

from bridle.proxy.session.harness_identity import Identity
from bridle.proxy.session.keys import (
    SESSION_KEY_PREFIX,
    VERIFIER_KEY_PREFIX,
    hash_key,
    new_verifier_key,
    same,
    session_named_in,
)
from bridle.proxy.session.memory import SessionMemory
from bridle.proxy.session.session import Session
from bridle.proxy.session.wrong_keys import WrongKeys
from bridle.proxy.settings import ProxySettings, is_loopback
from bridle.proxy.wire.canonical import ApiError
from bridle.store.errors import NotFound, RecordRejected, StoreUnavailable
from bridle.store.reading.queries import Reader
from bridle.store.records import SessionRecord, new_id
from bridle.store.writing.writer import Writer

log = logging.getLogger("bridle.proxy")

SESSION_ID_PREFIX: Final = "ses"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,255}")


class Caller(msgspec.Struct, frozen=True):
    """The rights that a request's credentials and address give."""

    admin: bool = False
    """True if it may use the control routes and any session."""
    session: Session | None = None
    """The session whose key was given. Its calls may be recorded and continued."""
    scores: str | None = None
    """Id of the session whose verifier key was given. It may be scored and sealed."""

    @property
    def keyless(self) -> bool:
        """Return whether the caller may only record, in sessions that have no key."""
        return not self.admin and self.session is None and self.scores is None

    def may_read(self, session: SessionRecord) -> bool:
        """Return whether the caller may read calls of the session, to continue them."""
        if self.session is not None:
            return self.session.id == session.id
        return self.admin or (self.keyless and session.key_hash is None)

    def may_score(self, session_id: str) -> bool:
        """Return whether the caller may reward and seal the session, and set kinds of its calls."""
        return self.admin or self.scores == session_id


class Sessions:
    """Sessions by id, name and key, from memory or the store, and the rules of admission."""

    def __init__(
        self,
        settings: ProxySettings,
        writer: Writer,
        reader: Reader,
        memory: SessionMemory,
        is_sealed: Callable[[str], Awaitable[bool]],
        is_named: Callable[[str], Awaitable[bool]],
        key_headers: Sequence[str] = (),
        vocabulary: str | None = None,
    ) -> None:
        """``is_sealed`` returns whether the session of an id is sealed in the store.

        ``is_named`` returns whether a session in the store has a name. ``key_headers`` are the
        headers in which clients may send a key, besides a bearer token.
        ``vocabulary`` is that of the sessions' tokens, if it is known.
        """
        self._settings = settings
        self._keyless = settings.keyless
        self._writer = writer
        self._reader = reader
        self._memory = memory
        self._is_sealed = is_sealed
        self._is_named = is_named
        self._key_headers = tuple(key_headers)
        self._vocabulary = vocabulary
        self._wrong_keys = WrongKeys()
        self._creating: dict[str, asyncio.Lock] = {}

    async def authenticate(self, headers: Mapping[str, str], address: str | None) -> Caller:
        """Return the caller's rights.

        Raise :class:`ApiError` (401) when there is no valid key and one is needed, or when a key in
        Bridle's form is not, or no longer, valid. An address that keeps sending wrong keys waits
        for that.
        """
        given = credentials(headers, self._key_headers)
        try:
            return await self._authenticated(given, headers, address)
        except ApiError as error:
            if given and error.status == 401:
                await self._wrong_keys.refused(address)
            raise

    async def _authenticated(
        self, given: Sequence[str], headers: Mapping[str, str], address: str | None
    ) -> Caller:
        admin_key = self._settings.admin_key
        for key in given:
            if admin_key is not None and same(key, admin_key):
                return Caller(admin=True)
        for key in given:
            if key.startswith(SESSION_KEY_PREFIX):
                return Caller(session=await self._by_key(key))
            if key.startswith(VERIFIER_KEY_PREFIX):
                return Caller(scores=await self._scored_by(key))
        if self._keyless and is_loopback(address) and _local(headers.get("host", "localhost")):
            return Caller(admin=admin_key is None)
        raise unauthorised(
            "this proxy needs a session key (brk_…) or the admin key"
            if given
            else "no API key was given"
        )

    async def admit(
        self, caller: Caller, path_session: str | None, identity: Identity
    ) -> Session | None:
        """Return the open session that a data request names.

        The request names it by key, path or the harness's own session id. Return ``None`` if it
        names none. Raise :class:`ApiError` when the session is sealed, expired, unknown or not the
        caller's.
        """
        if caller.scores is not None:
            raise ApiError("permission", "a verifier key records no calls", status=403)
        session = caller.session
        if session is not None:
            if path_session not in (None, session.id, session.record.name):
                raise ApiError(
                    "permission", "this key does not open the session in the path", status=403
                )
        elif path_session is not None:
            session = await self._named_in_path(path_session, identity)
        elif identity.session_name is not None:
            session = await self._named(identity.session_name, identity)
        if session is None:
            return None
        if not (caller.admin or caller.session or caller.may_read(session.record)):
            raise ApiError("permission", f"session {session.id} needs its own key", status=403)
        session = await self.current(session)
        if session.record.sealed_at is not None:
            raise ApiError("permission", f"session {session.id} is sealed", status=403)
        if session.record.expires_at is not None and session.record.expires_at <= time.time():
            raise unauthorised(f"session {session.id} has expired")
        return session

    async def anonymous(self, continued: Session | None, identity: Identity) -> Session:
        """Return the session of a request that only its conversation identifies.

        It is the session that the request continues while that is open, else a new one.
        """
        if continued is not None:
            continued = await self.current(continued)
            if continued.record.sealed_at is None:
                return continued
        return await self.create(self._record(identity))

    async def current(self, session: Session) -> Session:
        """Return the session as the store has it: another process may have sealed it."""
        if session.record.sealed_at is not None or not await self._is_sealed(session.id):
            return session
        self._memory.forget(session.id)
        return self._memory.add(await asyncio.to_thread(self._reader.session, session.id))

    def readable(self, caller: Caller) -> Callable[[str], bool]:
        """Return a function that decides whether the caller may read a session's calls.

        The function takes the session's id. It may read the store.
        """

        def may_read(session_id: str) -> bool:
            if not caller.keyless:
                return caller.admin or (
                    caller.session is not None and caller.session.id == session_id
                )
            try:
                return caller.may_read(self._reader.session(session_id))
            except NotFound:
                return False

        return may_read

    def named_by(
        self, caller: Caller, path_session: str | None, identity: Identity
    ) -> tuple[bool, Session | None]:
        """Return whether a data request names a session, and that session if it is in memory.

        This is no admission.
        """
        name = path_session or identity.session_name
        if caller.session is not None:
            return True, caller.session
        if name is None:
            return False, None
        return True, self._memory.get(name) or self._memory.named(name)

    async def find(self, id_or_name: str) -> Session | None:
        """Return a session by id, or else by name."""
        found = self._memory.get(id_or_name) or self._memory.named(id_or_name)
        if found is None:
            record = await asyncio.to_thread(self._read, id_or_name)
            return None if record is None else self._memory.add(record)
        return found

    def forget(self, session_id: str) -> None:
        """Drop a session that changed elsewhere, so that it is read from the store again."""
        self._memory.forget(session_id)

    async def create(self, record: SessionRecord) -> Session:
        """Store a new session.

        Raise :class:`ApiError`: 409 when its name is taken, 422 when it cannot be stored, 503 when
        the store is down.
        """
        record = replace(record, vocabulary=self._vocabulary)
        try:
            await self._writer.add(record)
        except RecordRejected as error:
            if record.name is not None and await self.find(record.name) is not None:
                refusal = ApiError(
                    "invalid_request", f"session {record.name!r} exists already", status=409
                )
            else:
                refusal = ApiError("invalid_request", f"it cannot be stored: {error}", status=422)
            raise refusal from error
        except StoreUnavailable as error:
            raise store_unavailable() from error
        return self._memory.add(record, new=True)

    async def seal(
        self, session_id: str, outcome: str, fields: Mapping[str, Any] | None = None
    ) -> None:
        """End the session; the first seal counts, wherever it was made.

        ``fields`` are further columns of the session to set. Raise 503.
        """
        try:
            await self._writer.seal_session(session_id, outcome, time.time(), fields)
        except StoreUnavailable as error:
            raise store_unavailable() from error
        self.forget(session_id)
        if self._settings.judge is not None:
            await self._judge(self._settings.judge, session_id)

    async def _judge(self, judge: Callable[[Reader, str], None], session_id: str) -> None:
        """Judge a sealed session. A session that cannot be judged stays sealed."""
        try:
            await asyncio.to_thread(judge, self._reader, session_id)
        except Exception:
            log.exception("session_not_judged", extra={"session": session_id})

    async def renew_verifier_key(self, session_id: str) -> str:
        """Return a new verifier key of the session, which makes the one before it invalid.

        Raise 503.
        """
        key = new_verifier_key(session_id)
        try:
            await self._writer.set_verifier_key(session_id, hash_key(key))
        except StoreUnavailable as error:
            raise store_unavailable() from error
        self.forget(session_id)
        return key

    async def _scored_by(self, key: str) -> str:
        """Return the id of the session that a verifier key scores.

        The store is read each time, since another process may have renewed the key.
        """
        session_id = session_named_in(key)
        try:
            record = await asyncio.to_thread(self._reader.session, session_id)
        except NotFound:
            record = None
        known = None if record is None else record.verifier_key_hash
        if known is None or not same(hash_key(key), known):
            raise unauthorised("this verifier key is not known here")
        return session_id

    async def _by_key(self, key: str) -> Session:
        digest = hash_key(key)
        session = self._memory.keyed(digest)
        if session is None:
            record = await asyncio.to_thread(self._reader.session_by_key_hash, digest)
            if record is None:
                raise unauthorised("this session key is not known here")
            session = self._memory.add(record)
        known, expires_at = session.record.key_hash, session.record.expires_at
        if known is None or not same(digest, known):
            raise unauthorised("this session key is not known here")
        if expires_at is not None and expires_at <= time.time():
            raise unauthorised("this session key has expired")
        return session

    async def _named_in_path(self, name: str, identity: Identity) -> Session:
        if name.startswith(f"{SESSION_ID_PREFIX}_"):
            session = await self.find(name)
            if session is None:
                raise ApiError("not_found", f"there is no session {name}", status=404)
            return session
        if not _NAME.fullmatch(name):
            raise ApiError(
                "invalid_request",
                "a session name has up to 256 letters, digits and . _ : @ -",
                status=400,
            )
        return await self._named(name, identity)

    async def _named(self, name: str, identity: Identity) -> Session:
        """Return the session called ``name``.

        It is created on first use, only once for concurrent requests.
        """
        session = self._memory.named(name)
        if session is not None:
            return session
        if await self._is_named(name):
            record = await asyncio.to_thread(self._reader.session_by_name, name)
            if record is not None:
                return self._memory.add(record)
        lock = self._creating.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                # A request that waited for the lock finds what was made meanwhile.
                session = self._memory.named(name)
                if session is not None:
                    return session
                try:
                    return await self.create(self._record(identity, name))
                except ApiError as error:
                    # Another process was faster.
                    session = await self.find(name) if error.status == 409 else None
                    if session is None:
                        raise
                    return session
        finally:
            if not lock.locked():
                self._creating.pop(name, None)

    def _record(self, identity: Identity, name: str | None = None) -> SessionRecord:
        return SessionRecord(
            id=new_id(SESSION_ID_PREFIX),
            created_at=time.time(),
            name=name,
            harness=identity.harness,
            continuation=self._settings.continuation,
        )

    def _read(self, id_or_name: str) -> SessionRecord | None:
        try:
            return self._reader.session(id_or_name)
        except NotFound:
            return self._reader.session_by_name(id_or_name)


def credentials(headers: Mapping[str, str], key_headers: Sequence[str]) -> list[str]:
    """Return every key that the request carries.

    A key is a bearer token or stands in one of the providers' ``key_headers``.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token if scheme.lower() == "bearer" else ""
    given = filter(None, (bearer, *map(headers.get, key_headers)))
    return [*filter(None, map(str.strip, given))]


def unauthorised(message: str) -> ApiError:
    return ApiError("authentication", message, status=401)


def store_unavailable() -> ApiError:
    return ApiError(
        "store_unavailable",
        "the call cannot be recorded: the store is not available",
        status=503,
        retry_after=1.0,
    )


def store_not_read(error: StoreUnavailable) -> ApiError:
    """Log ``error`` and return the error that clients get for it."""
    log.error("store_not_read", extra={"error": str(error)})
    return store_unavailable()


@lru_cache(maxsize=1024)
def _local(host: str) -> bool:
    """Return whether the client asked for this machine by a local name.

    A web page that was directed here by a rebound DNS name did not. ``host`` may end in a port.
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name)
