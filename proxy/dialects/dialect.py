"""One object for each provider's wire API: everything that the proxy knows of it.

A :class:`Dialect` has its paths, the functions between the provider's JSON and the canonical
request and events, the shape of its errors and model lists, and the :class:`Provider` whose clients
use it. No other part of the proxy compares a dialect's name with anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.received import ReceivedReply
from bridle.proxy.dialects.wording import Change, Wording
from bridle.proxy.wire.canonical import ApiError, Emitter, HttpError, Minted, Parse, Reply, Request
from bridle.proxy.wire.histories import ParseOn
from bridle.store.reading.queries import CallRow, Reader

LONGEST_NAME: Final = 16
"""Maximum characters of a dialect's name, which is a column of the store."""


class Action(Enum):
    """The purpose of a request on a data route."""

    GENERATE = auto()
    COUNT = auto()
    MODELS = auto()
    HELLO = auto()
    STORED = auto()
    """Read or delete a stored reply."""
    CONVERSATION = auto()
    """Make, read, change or delete a conversation object, or its items."""
    BESIDE = auto()
    """Pass a request that is no chat on to the upstream for it."""
    NOTHING = auto()
    """A path that another dialect's pattern would match although nothing is served there."""


Takes = Callable[[str, Mapping[str, str]], bool]
"""A function that returns whether a request with this method and these headers is the dialect's.
The headers' names are in lower case."""


def sent_with(header: str) -> Takes:
    """Return a function that recognises the requests of a provider's clients by a header."""
    return lambda method, headers: header in headers


@dataclass(frozen=True, slots=True)
class ApiPath:
    """A path, or a pattern of paths, at which a dialect is served."""

    pattern: str
    """A regular expression for the whole path. Its named groups are the route's parameters: a path
    of ``MODELS`` may have ``model``, one of ``STORED`` has ``response`` and, if it is about the
    reply's input, ``part``, one of ``CONVERSATION`` may have ``conversation``, ``items`` and
    ``item``, and one of ``BESIDE`` has ``route`` and ``rest``."""
    action: Action = Action.GENERATE
    methods: str = "POST"
    """The permitted method, or several with commas between."""
    takes: Takes | None = None
    """Recognises the dialect's own requests on a path that several dialects share; ``None`` takes
    all requests."""


@dataclass(frozen=True, slots=True)
class Provider:
    """The provider of an API, as its official clients know it."""

    name: str
    """The key of the provider's base URL in the ``base_urls`` of a session."""
    url_variables: tuple[str, ...] = ()
    """Environment variables from which its clients read the base URL."""
    key_variables: tuple[str, ...] = ()
    """Environment variables from which its clients read the key."""
    base_path: str = ""
    """The end of the base URL after the session's root: ``/v1`` if the clients do not add it."""
    key_header: str | None = None
    """The header with the key, in lower case, if it is not ``Authorization: Bearer``."""
    trace_name: str | None = None
    """The provider's name in OpenTelemetry's conventions, if it is not :attr:`name`."""

    def base_url(self, root: str) -> str:
        """Return the base URL of the session whose root is ``root``."""
        return root + self.base_path

    def environment(self, root: str, key: str) -> dict[str, str]:
        """Return the variables by which clients find the session and its key."""
        urls = dict.fromkeys(self.url_variables, self.base_url(root))
        return urls | dict.fromkeys(self.key_variables, key)


class Counting(NamedTuple):
    """The request for the number of tokens of a prompt, and the reply to it."""

    parse: Parse
    reply: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that clients may name."""

    id: str
    created: int
    """Seconds since the epoch."""
    context_length: int | None = None
    """Maximum tokens of prompt and reply together, if the engine reports it."""


class ModelList(NamedTuple):
    """The replies to requests for the models."""

    one: Callable[[Model], bytes]
    all: Callable[[Sequence[Model]], bytes]


@dataclass(frozen=True, slots=True)
class Native:
    """An upstream's own side of the dialect, for requests that are passed on as they are."""

    addresses: re.Pattern[str]
    """Found in the addresses of the upstreams that are known to serve the dialect."""
    reader: Callable[[Request], ReceivedReply]
    """Makes the reader of one reply to a request."""
    wording: Wording
    """The places of words in the bodies."""
    stream: Callable[[Request, Json], bytes]
    """Writes a whole reply as the stream that a request asks for, each text in one piece."""
    headers: tuple[str, ...] = ()
    """The beginnings of the names of the client's headers that the upstream gets, in lower case.
    The provider's header for a key is none of them."""
    change: Change | None = None
    """Changes the arguments of tool calls in replies, if they are not passed on as they are."""


Readable = Callable[[str], bool]
"""A function that takes a session's id and returns True if the client may read its recorded
replies."""


class StoredReplies(Protocol):
    """Recorded replies to which requests of a dialect refer by their ids.

    All but ``expand`` are needed for paths of ``STORED`` alone.
    """

    async def expand(self, request: Request, body: bytes, readable: Readable) -> Request:
        """Return ``request``, parsed from ``body``, with the recorded parts that it refers to.

        Raise :class:`ApiError` in the dialect's words if a part is not stored here, or not for this
        client.
        """
        ...

    async def find(self, response_id: str) -> CallRow | None:
        """Return the call that made the reply; ``None`` if it is not stored for its client."""
        ...

    async def whole(self, call: CallRow) -> bytes | None:
        """Return the reply as a client reads it later; ``None`` if not all of it was sent."""
        ...

    async def inputs(self, call: CallRow, query: Mapping[str, str]) -> bytes:
        """Return a page of the items that the call was asked with, for paths with ``part``."""
        ...

    def unknown(self, response_id: str) -> ApiError:
        """Return the error for a reply that is not stored for the client."""
        ...

    def deleted(self, response_id: str) -> bytes:
        """Return the reply to the request that deleted a stored reply."""
        ...

    def forget(self, call_id: str) -> None:
        """Drop a reply that was deleted."""
        ...

    def keep(self, upstream_id: str, call_id: str) -> None:
        """Remember the upstream's own id of the reply that a call got."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """A provider's wire API.

    All but ``stored`` are pure functions: no I/O, no clocks, no randomness.
    """

    name: str
    """The name in the record; at most 16 characters."""
    provider: Provider
    paths: tuple[ApiPath, ...]
    parse: Parse
    emitter: Callable[[Request, Minted], Emitter]
    reply: Callable[[Request, Minted, Reply], bytes]
    error: Callable[[ApiError], HttpError]
    models: ModelList
    response_prefix: str
    """The prefix of response ids."""
    tool_call_prefix: str = "call"
    misplaced: re.Pattern[str] | None = None
    """Found in paths that only this dialect's clients ask for; at such a path where nothing is
    served, the error is the dialect's."""
    count: Counting | None = None
    """Needed for paths of ``COUNT``."""
    stored: Callable[[Reader], StoredReplies] | None = None
    """Makes the reader of recorded replies to which requests of the dialect refer. Needed for paths
    of ``STORED``, and for a ``parse`` that returns references."""
    parse_on: ParseOn | None = None
    """Parses like ``parse``, without reading again what an earlier body has; ``None`` for a dialect
    whose bodies are always read whole."""
    native: Native | None = None
    """``None`` for a dialect that is always translated to chat."""
    operation: str = "chat"
    """The operation's name in OpenTelemetry's conventions."""

    def mint(self, call_id: str, created: int, model: str) -> Minted:
        """Return the opaque values of the call's reply."""
        response_id = f"{self.response_prefix}_{call_id.removeprefix('call_')}"
        return Minted(call_id, created, response_id, model)
