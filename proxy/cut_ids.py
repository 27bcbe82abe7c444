"""Cuts a long array of prompt ids out of an engine's JSON, so that it never becomes Python ints.

A prompt of 50,000 ids is most of its reply's bytes, and decoding it to a list and the list to an
array costs more than all else that the call needs. What is cut is proven to be the array: the key's
closing quote is followed by a colon, which no text inside a JSON string can show (its quotes are
escaped), the array holds digits and single commas only, and the rest, with :data:`MARK` in the
array's place, is still decoded strictly. Whatever looks otherwise is left to the decoder.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from store.records import TokenIds

MARK: Final = "cut"
"""Stands in the JSON where the array was."""

WORTH_CUTTING: Final = 16_384
"""Bytes of JSON from which on cutting beats decoding."""

_KEY: Final = b'"prompt_token_ids":'
_COMMA: Final = ord(",")
_IDS_END: Final = 2**32


def cut_prompt_ids(payload: bytes) -> tuple[bytes, TokenIds | None]:
    """``payload`` without its first ``prompt_token_ids``, and these as ``uint32[P]``.

    Returns the payload untouched and ``None`` when there is nothing to cut or any doubt.
    """
    if len(payload) < WORTH_CUTTING:
        return payload, None
    key = payload.find(_KEY)
    if key < 0 or (key and payload[key - 1 : key] == b"\\"):
        return payload, None
    start = key + len(_KEY)
    if payload[start : start + 1] == b" ":
        start += 1
    end = payload.find(b"]", start)
    if payload[start : start + 1] != b"[" or end < 0:
        return payload, None
    ids = _ids(payload[start + 1 : end])
    if ids is None:
        return payload, None
    return b'%b"%b"%b' % (payload[:start], MARK.encode(), payload[end + 1 :]), ids


def _ids(text: bytes) -> TokenIds | None:
    if not text or text.translate(None, b"0123456789,"):
        return None
    commas = np.frombuffer(text, dtype=np.uint8) == _COMMA
    if commas[0] or commas[-1] or bool((commas[1:] & commas[:-1]).any()):
        return None
    ids = np.fromstring(text, dtype=np.int64, sep=",")
    # Numbers beyond int64 are read as its largest value, and so fail here too.
    if int(ids.max()) >= _IDS_END:
        return None
    return ids.astype(np.uint32)
