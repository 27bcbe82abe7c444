"""Texts of calls unpacked: finds the wrapping, the vocabulary and the tokens they were packed with.

Wrappings and vocabularies never change, so that those in use are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from sqlalchemy import BindParameter, Connection, Engine, Row, Select, bindparam, select

from bridle.store.encoding.packing import unpack, unpack_ids
from bridle.store.encoding.texts import CallTokens, Context, Texts, stands_alone, unpack_texts
from bridle.store.encoding.vocabulary import Vocabulary
from bridle.store.errors import NotFound
from bridle.store.records import TokenIds
from bridle.store.schema.tables import calls, spans, templates, vocabularies
from bridle.store.writing.rows import OBSERVED

_CONTEXTS_KEPT: Final = 512
_AT_ONCE: Final = 500
"""Identifiers per statement: databases bound the number of parameters."""

PACKED: Final = (calls.c.id, calls.c.session_id, calls.c.template_id, calls.c.texts)
"""The columns of :class:`PackedTexts`."""

_CALLS: Final[BindParameter[Any]] = bindparam("calls", expanding=True)
_TOKENS: Final[Select[Any]] = (
    select(
        spans.c.call_id,
        spans.c.choice,
        spans.c.parent_call_id,
        spans.c.parent_choice,
        spans.c.token_ids,
    )
    .where(spans.c.call_id.in_(_CALLS))
    .order_by(spans.c.call_id, spans.c.choice)
)


class PackedTexts(NamedTuple):
    """A call's texts as its row has them."""

    call_id: str
    session_id: str
    template_id: bytes | None
    texts: bytes

    @classmethod
    def of(cls, row: Row[Any]) -> Self:
        return cls(row.id, row.session_id, row.template_id, row.texts)


class TextReader:
    """Unpacks texts, over any connections to one store; may be shared by threads."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[str, bytes], Context] = OrderedDict()
        self._vocabularies: dict[str, Vocabulary] = {}
        self.latest_request: tuple[str, bytes] = ("", b"")
        """A call and its request, which those of later calls are spliced from: who reads a session
        in its order need not follow the chain from its beginning every time."""

    def read(self, connection: Connection, packed: Sequence[PackedTexts]) -> dict[str, Texts]:
        """Texts by call. Raises ``ValueError`` for damaged ones."""
        leaning = [one for one in packed if not stands_alone(one.texts)]
        tokens = call_tokens(connection, [one.call_id for one in leaning])
        return {one.call_id: self.unpack(connection, one, tokens) for one in packed}

    def unpack(
        self, connection: Connection, packed: PackedTexts, tokens: Mapping[str, CallTokens]
    ) -> Texts:
        """One call's, with what :func:`call_tokens` found for it."""
        if packed.template_id is None or stands_alone(packed.texts):
            return unpack_texts(packed.texts)
        context = self.context(connection, packed.session_id, packed.template_id)
        return unpack_texts(packed.texts, context.dictionary(tokens[packed.call_id]))

    def context(self, connection: Connection, session_id: str, template_id: bytes) -> Context:
        """A template's. Raises :class:`NotFound`."""
        key = (session_id, bytes(template_id))
        found = self._contexts.get(key)
        if found is None:
            row = connection.execute(
                select(templates.c.kind, templates.c.vocabulary_id, templates.c.data).where(
                    templates.c.session_id == session_id, templates.c.id == template_id
                )
            ).first()
            if row is None:
                raise NotFound(f"session {session_id} has no template {key[1].hex()}")
            vocabulary = row.vocabulary_id and self._vocabulary(connection, row.vocabulary_id)
            found = self._contexts[key] = Context.of(row.kind, unpack(row.data), vocabulary)
            if len(self._contexts) > _CONTEXTS_KEPT:
                self._contexts.popitem(last=False)
        return found

    def _vocabulary(self, connection: Connection, vocabulary_id: str) -> Vocabulary:
        found = self._vocabularies.get(vocabulary_id)
        if found is None:
            query = select(vocabularies.c.data).where(vocabularies.c.id == vocabulary_id)
            packed = connection.execute(query).scalar()
            if packed is None:
                raise NotFound(f"no vocabulary {vocabulary_id}")
            found = self._vocabularies[vocabulary_id] = Vocabulary.unpack(packed)
        return found


class LateTexts:
    """Texts of some calls, unpacked when first looked at; the tokens of all are read at once."""

    def __init__(self, engine: Engine, reader: TextReader) -> None:
        self._engine = engine
        self._reader = reader
        self.packed: dict[str, tuple[str, bytes | None, bytes]] = {}
        """By call what else is in :class:`PackedTexts`: plain, for there are very many."""
        self._tokens: dict[str, CallTokens] | None = None
        self._latest: tuple[str, Texts] | None = None
        """Who looks at a call's message mostly looks at its conversation next."""

    def of(self, call_id: str) -> Texts:
        """A call's texts. Raises :class:`NotFound` when its session was forgotten meanwhile."""
        if self._latest is not None and self._latest[0] == call_id:
            return self._latest[1]
        session_id, template_id, packed = self.packed[call_id]
        if stands_alone(packed):
            texts = unpack_texts(packed)
        else:
            with self._engine.connect() as connection:
                if self._tokens is None:
                    self._tokens = call_tokens(connection, self._leaning())
                one = PackedTexts(call_id, session_id, template_id, packed)
                texts = self._reader.unpack(connection, one, self._tokens)
        self._latest = (call_id, texts)
        return texts

    def _leaning(self) -> list[str]:
        return [call_id for call_id, (*_, one) in self.packed.items() if not stands_alone(one)]


def call_tokens(connection: Connection, call_ids: Sequence[str]) -> dict[str, CallTokens]:
    """The tokens that these calls' texts repeat."""
    rows = list(_token_rows(connection, call_ids))
    ids = {(row.call_id, row.choice): unpack_ids(row.token_ids) for row in rows}
    parents = {
        row.call_id: (row.parent_call_id or row.call_id, row.parent_choice)
        for row in rows
        if row.choice == OBSERVED and row.parent_choice is not None
    }
    elsewhere = sorted({call_id for call_id, _ in parents.values()} - set(call_ids))
    for row in _token_rows(connection, elsewhere):
        ids[row.call_id, row.choice] = unpack_ids(row.token_ids)
    sampled: dict[str, list[TokenIds]] = {call_id: [] for call_id in call_ids}
    for row in rows:
        if row.choice != OBSERVED:
            sampled[row.call_id].append(ids[row.call_id, row.choice])
    return {
        call_id: CallTokens(
            ids.get(parents.get(call_id, ("", OBSERVED))),
            ids.get((call_id, OBSERVED)),
            tuple(sampled[call_id]),
        )
        for call_id in call_ids
    }


def _token_rows(connection: Connection, call_ids: Sequence[str]) -> Iterator[Row[Any]]:
    for start in range(0, len(call_ids), _AT_ONCE):
        yield from connection.execute(_TOKENS, {"calls": call_ids[start : start + _AT_ONCE]})
