"""What a call says in text, in one packed value: its request's addition, its message, its
conversation's state and its reply.

The four repeat each other and the text of the call's own tokens, so they are one zstd frame, whose
dictionary is made of a *wrapping* (the same four of an earlier call of the session: field names,
identifiers, settings) and of the text of the tokens (``store/encoding/vocabulary.py``). Both are at
hand in the store; no frame needs another frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from bridle.store.encoding.bodies import Splice
from bridle.store.encoding.events import from_columns, to_columns
from bridle.store.encoding.packing import DICTIONARY, pack_against, pack_proved, unpack_against
from bridle.store.encoding.varint import read_varints, varints
from bridle.store.encoding.vocabulary import SEPARATOR, Vocabulary
from bridle.store.records import TokenIds

_ABSENT, _PLAIN, _COLUMNS = range(3)
"""How a reply is kept."""
_FORMS: Final = {_PLAIN: "plain", _COLUMNS: "columns"}

_FIELDS: Final = 7


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The bytes that a client was sent, as they are kept."""

    form: int
    kept: bytes

    @classmethod
    def of(cls, data: bytes) -> Reply:
        columns = to_columns(data)
        return cls(_PLAIN, data) if columns is None else cls(_COLUMNS, columns)

    @property
    def data(self) -> bytes:
        """The bytes as they were."""
        return from_columns(self.kept) if self.form == _COLUMNS else self.kept


class Texts(msgspec.Struct, frozen=True, gc=False):
    """A call's texts as they were."""

    request: Splice | None
    """``None`` when the request is stored whole (``bodies``)."""
    conversation: bytes
    """JSON, like the message; empty for an empty one."""
    message: bytes
    reply: Reply | None
    """``None`` when there was none, or when it is stored whole."""

    @property
    def kind(self) -> str:
        """Texts of one kind have the same parts and are alike in their wrapping."""
        request = "whole" if self.request is None else "spliced"
        reply = "none" if self.reply is None else _FORMS[self.reply.form]
        return f"{request}/{reply}"


class CallTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens whose text a call's texts repeat: ``uint32[…]`` each."""

    before: TokenIds | None
    """Of the span that the observed ones hang on: mostly the reply that the request answers."""
    observed: TokenIds | None
    sampled: tuple[TokenIds, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """What texts are packed against."""

    wrapping: bytes
    vocabulary: Vocabulary | None
    streamed: bool
    """Whether replies are columns, which have the text token by token."""

    @classmethod
    def of(cls, kind: str, wrapping: bytes, vocabulary: Vocabulary | None) -> Context:
        """For texts of a ``kind`` (:attr:`Texts.kind`)."""
        return cls(wrapping, vocabulary, kind.endswith(_FORMS[_COLUMNS]))

    def dictionary(self, tokens: CallTokens) -> bytes:
        """zstd's: what is nearest to its end costs the least to refer to."""
        if self.vocabulary is None:
            return self.wrapping
        asked = [span for span in (tokens.before, tokens.observed) if span is not None]
        if not asked and not tokens.sampled:
            return self.wrapping
        pieces = self.vocabulary.texts([*asked, *tokens.sampled])
        said = b"".join(pieces).replace(SEPARATOR, b"")
        return b"".join((self.wrapping, said, *(pieces[len(asked) :] if self.streamed else ())))


def lay_out(texts: Texts) -> bytes:
    """The texts side by side, for :func:`pack_texts` and as a wrapping."""
    request, reply = texts.request, texts.reply
    middle = b"" if request is None else request.data
    head = varints(
        (
            _ABSENT if reply is None else reply.form,
            request is not None,
            0 if request is None else request.prefix,
            0 if request is None else request.suffix,
            len(middle),
            len(texts.conversation),
            len(texts.message),
        )
    )
    kept = b"" if reply is None else reply.kept
    return b"".join((head, middle, texts.conversation, texts.message, kept))


def read_laid_out(data: bytes) -> Texts:
    """What :func:`lay_out` was given. Raises ``ValueError`` for what it cannot have made, and
    ``IndexError``."""
    (form, spliced, prefix, suffix, *lengths), at = read_varints(data, 0, _FIELDS)
    parts: list[bytes] = []
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    if form not in (_ABSENT, *_FORMS) or at > len(data):
        raise ValueError("what a call says is damaged")
    middle, conversation, message = parts
    return Texts(
        Splice(prefix, suffix, middle) if spliced else None,
        conversation,
        message,
        None if form == _ABSENT else Reply(form, data[at:]),
    )


def pack_texts(laid_out: bytes, context: Context, tokens: CallTokens) -> bytes:
    """``calls.texts``, for :func:`unpack_texts` with the same dictionary."""
    dictionary = context.dictionary(tokens)
    returns = dictionary is context.wrapping
    return pack_against(laid_out, dictionary, or_else=pack_proved, returns=returns)


def pack_alone(laid_out: bytes) -> bytes:
    """``calls.texts``, for :func:`unpack_texts` with nothing else at hand."""
    return pack_proved(laid_out)


def stands_alone(packed: bytes) -> bool:
    """Whether :func:`unpack_texts` needs neither context nor tokens."""
    return packed[0] != DICTIONARY


def unpack_texts(packed: bytes, dictionary: bytes = b"") -> Texts:
    """What was packed with that dictionary. Raises ``ValueError`` for a damaged value."""
    try:
        return read_laid_out(unpack_against(packed, dictionary))
    except IndexError as error:
        raise ValueError("what a call says is damaged") from error
