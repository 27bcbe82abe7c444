"""The declaration of a call: each fact about it is named once, here.

The table ``calls``, the insert and the update of a row, the reader, the SQL view ``turns``, the
control API's JSON and the column table of docs/sql.md follow from the fields below
(``store/declaration.py``). A new fact is a line in one of these classes, a migration, the line
that sets the fact, and the page made again (``python tests/store/sql_page.py``).

The classes are the phases of a call: facts of its beginning (:class:`BegunFacts`), those that the
writer adds to it (:class:`WrittenFacts`, and :class:`bridle.store.records.LineageState`), facts of
its end (:class:`EndedFacts`), those that the writer derives from it (:class:`DerivedFacts`), and
what a person decides later (:class:`DecidedFacts`). The default of a field is its value until it is
known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Final

from bridle.store.declaration import SHORT_TEXT, Fact
from bridle.store.records import (
    ALSO_BROKE_ON,
    CONSTRAINED,
    BreakReason,
    CallKind,
    CallStatus,
    Choice,
    Conversation,
    Growth,
    Message,
    Note,
    RoutedExperts,
    Sampler,
    TokenIds,
)


@dataclass(frozen=True, kw_only=True)
class BegunFacts:
    """The facts that are known when a request is admitted."""

    id: Annotated[str, Fact("The call's id", size=64, key=True)]
    session_id: Annotated[str, Fact("Its session's id", size=64, references="sessions.id")]
    dialect: Annotated[str, Fact("The wire API of the request, such as `chat`", size=16)]
    started_at: Annotated[float, Fact("The time at which the request was admitted", time=True)]
    stream: Annotated[bool, Fact("True if the client asked for a stream")]
    model_requested: Annotated[str, Fact("The model that the client asked for")]
    parent_call_id: Annotated[
        str | None, Fact("The id of the call that this one continues", size=64)
    ] = None
    lineage_rule: Annotated[
        str | None,
        Fact(
            "The rule that found the parent: `minted_id`, `content`, `position`, `token_prefix`",
            size=32,
        ),
    ] = None
    replayed_call_id: Annotated[
        str | None,
        Fact("The recorded call whose reply was sent; NULL if no record was replayed", size=64),
    ] = None
    headers: Annotated[
        Mapping[str, str], Fact("Headers that identify the harness; never credentials")
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WrittenFacts:
    """The facts that the writer adds to the beginning of a call."""

    writer_id: Annotated[str, Fact("The writer of the call's process", size=64, shown=False)]
    request_sha256: Annotated[
        str, Fact("SHA-256 of the client's bytes", size=32, digest=True, shown=False)
    ]
    request_messages: Annotated[
        int | None,
        Fact("Number of messages of the whole request; NULL if they were not read", shown=False),
    ] = None
    instructions: Annotated[
        bool | None,
        Fact("Whether the first message is a Responses request's `instructions`", shown=False),
    ] = None
    tools_id: Annotated[
        bytes | None, Fact("The request's tools, in the table `tool_sets`", size=16, shown=False)
    ] = None


@dataclass(frozen=True, kw_only=True)
class EndedFacts:
    """The facts that are known when a call is over."""

    kind: Annotated[CallKind, Fact("The purpose of the call", size=16)] = CallKind.UNKNOWN
    role: Annotated[
        str | None, Fact("Name of the sub-agent or side task, if the harness names it")
    ] = None
    status: Annotated[
        CallStatus,
        Fact(
            "`complete`, `partial`, `failed`, `quarantined` or `interrupted`; `open` while it runs",
            size=16,
        ),
    ] = CallStatus.OPEN
    reason: Annotated[
        str | None, Fact("The reason why the call failed, was cut or was quarantined")
    ] = None
    break_reason: Annotated[
        BreakReason | None,
        Fact("The reason why the call does not continue its parent in tokens", size=32),
    ] = None
    model_served: Annotated[str | None, Fact("The model that the engine says it served")] = None
    policy: Annotated[
        str | None,
        Fact("The policy that was asked; NULL for the default one, or for none", size=SHORT_TEXT),
    ] = None
    sampling: Annotated[
        Mapping[str, Any], Fact("The sampling parameters as sent to the engine", nullable=True)
    ] = field(default_factory=dict)
    sampler: Annotated[
        Sampler | None,
        Fact("What the tokens were drawn from, without the values of the policy's own sampling"),
    ] = None
    usage: Annotated[Mapping[str, Any], Fact("The engine's count of tokens", nullable=True)] = (
        field(default_factory=dict)
    )
    error: Annotated[Mapping[str, Any], Fact("The error that was sent", nullable=True)] = field(
        default_factory=dict
    )
    notes: Annotated[
        tuple[Note, ...],
        Fact("What was dropped, converted or weakened: `name` and `detail`", nullable=True),
    ] = ()
    first_token_at: Annotated[float | None, Fact("The time of the first token", time=True)] = None
    ended_at: Annotated[float | None, Fact("The time of the call's end", time=True)] = None


@dataclass(frozen=True, kw_only=True)
class DerivedFacts:
    """The facts that the writer derives from the end of a call."""

    prompt_span_id: Annotated[
        str | None,
        Fact(
            "The span in whose path the first `prompt_tokens` tokens are the prompt",
            size=80,
            shown=False,
        ),
    ] = None
    prompt_tokens: Annotated[int | None, Fact("Number of prompt tokens")] = None
    sampled_tokens: Annotated[int | None, Fact("Number of sampled tokens of all choices")] = None
    version_start: Annotated[
        int | None, Fact("The lowest policy version of a sampled token", big=True)
    ] = None
    version_end: Annotated[
        int | None, Fact("The highest policy version of a sampled token", big=True)
    ] = None
    finish_reason: Annotated[str | None, Fact("Why the first choice ended", size=32)] = None
    response_sha256: Annotated[
        str | None,
        Fact("SHA-256 of the bytes sent to the client", size=32, digest=True, shown=False),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DecidedFacts:
    """The purpose of a call as a person decided it.

    It takes precedence over everything recorded.
    """

    kind_set: Annotated[
        CallKind | None, Fact("The kind that a person decided", size=16, shown=False)
    ] = None
    role_set: Annotated[str | None, Fact("The role that a person decided", shown=False)] = None
    kind_by: Annotated[str | None, Fact("The person who decided", shown=False)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegun(BegunFacts):
    """The record of an admitted request; it is written before the engine is asked."""

    request_body: bytes
    """The client's bytes as they came."""
    repeats: tuple[bytes, int] | None = None
    """An earlier body, and a number of bytes that this one is known to begin with alike."""
    conversation: Conversation | None = None
    """The messages of the request; ``None`` if it has none that were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded(EndedFacts):
    """The record of a call that is over. The reply may be delivered once it is committed."""

    id: str
    session_id: str
    status: CallStatus = field()
    ended_at: float = field()
    prompt_token_ids: TokenIds | None = None
    """The prompt's ids, ``uint32[P]``, as the engine reports that it used them; ``None`` without a
    report."""
    prompt_experts: RoutedExperts | None = None
    """The experts behind the last tokens of the prompt; ``None`` if the engine reported none."""
    choices: tuple[Choice, ...] = ()
    growth: Growth | None = None
    """The place of these tokens in the session's tree; if ``None``, they are stored whole."""
    response_body: bytes = b""
    """The bytes that were sent to the client (the whole event stream when streaming)."""
    replies: tuple[Message, ...] = ()
    """The reply of each choice, its tool calls under their minted ids."""
    compared: bool = False
    """True if the call was already checked for contradictions (``integrity.py``); if not, the
    writer checks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow(BegunFacts, WrittenFacts, EndedFacts, DerivedFacts, DecidedFacts):
    """A call as recorded. Fields have their defaults where the value is not (yet) known."""

    conversation: Conversation | None = None
    """The messages of the request; ``None`` if they were not read."""
    replies: tuple[Message, ...] = ()
    """The reply of each choice; empty if the call has no reply."""

    @property
    def break_reasons(self) -> tuple[str, ...]:
        """All reasons of the call's break, that of the first difference first."""
        if self.break_reason is None:
            return ()
        others = (note.detail for note in self.notes if note.name == ALSO_BROKE_ON)
        return (self.break_reason.value, *others)

    @property
    def constrained(self) -> bool:
        """Return whether the request asked for a reply constrained by a grammar."""
        return any(note.name == CONSTRAINED for note in self.notes)

    def with_kind(self, kind: CallKind, role: str | None) -> CallRow:
        """Return this call with another kind and role.

        ``dataclasses.replace`` takes three times as long, and every call of every session is
        classified.
        """
        values = dict(zip(_FIELDS, _values(self), strict=True))
        return CallRow(**values | {"kind": kind, "role": role})


_FIELDS: Final = tuple(CallRow.__dataclass_fields__)
_values: Final = attrgetter(*_FIELDS)
