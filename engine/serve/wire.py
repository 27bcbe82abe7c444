"""Reply JSON that both completion faces share: usage, logprob entries, event framing."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from bridle.engine.contract.contract import MISSING_LOGPROB
from bridle.engine.contract.detokenizer import Vocabulary
from bridle.engine.serve.backend import PromptLogprob, SampledToken

_BYTE: Final = 256
DONE: Final = b"data: [DONE]\n\n"


def event(payload: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def experts(routed: NDArray[np.int16] | None) -> dict[str, str]:
    """Return ``routed_experts``, the base64 of a ``.npy`` file as in vLLM, if there are any."""
    if routed is None:
        return {}
    kind = np.uint8 if routed.max(initial=0) < _BYTE else np.uint16
    with io.BytesIO() as file:
        np.save(file, routed.astype(kind), allow_pickle=False)
        return {"routed_experts": base64.b64encode(file.getbuffer()).decode("ascii")}


def sampling_mask(tokens: Sequence[SampledToken]) -> dict[str, list[Sequence[int]]]:
    """Return ``sampling_mask``, the ids that each token was drawn from, if any were left out."""
    kept = [token.kept for token in tokens]
    return {"sampling_mask": list(kept)} if any(kept) else {}


def finite(logprob: float) -> float:
    """Return ``logprob``, but at least vLLM's floor, because JSON has no infinities."""
    return max(logprob, MISSING_LOGPROB)


TextOf = Callable[[int], str]
"""A function from a token's id to the text that stands for it in logprobs."""


def texts(vocabulary: Vocabulary, as_ids: bool | None) -> TextOf:
    """Return the function for a request; ``as_ids`` is its ``return_tokens_as_token_ids``."""
    return "token_id:{}".format if as_ids else vocabulary.token_text


def chat_logprobs(tokens: Iterable[SampledToken], text_of: TextOf) -> dict[str, Any]:
    """Return ``choices[i].logprobs`` of a chat reply."""
    return {
        "content": [
            {
                **_entry(token.id, token.logprob, text_of),
                "top_logprobs": [
                    _entry(token_id, logprob, text_of) for token_id, logprob in token.top
                ],
            }
            for token in tokens
        ]
    }


def completion_logprobs(
    tokens: Iterable[SampledToken], text_of: TextOf, offset: int
) -> dict[str, Any]:
    """Return ``choices[i].logprobs`` of a text completion.

    ``offset`` is the number of characters before these tokens.
    """
    texts, values, offsets, tops = [], [], [], []
    for token in tokens:
        text = text_of(token.id)
        texts.append(text)
        values.append(finite(token.logprob))
        offsets.append(offset)
        offset += len(text)
        tops.append(
            {
                text_of(token_id): finite(logprob)
                for token_id, logprob in ((token.id, token.logprob), *token.top)
            }
        )
    return {
        "tokens": texts,
        "token_logprobs": values,
        "text_offset": offsets,
        "top_logprobs": tops,
    }


def prompt_logprobs(
    entries: Iterable[PromptLogprob | None], vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``, ``{id: {logprob, rank, decoded_token}}`` per prompt id."""

    def describe(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": vocabulary.token_text(token_id),
        }

    written: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            written.append(None)
            continue
        likeliest = {
            str(token_id): describe(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        own = {str(entry.id): describe(entry.id, entry.logprob, entry.rank)}
        written.append(own | likeliest)
    return written


def _entry(token_id: int, logprob: float, text_of: TextOf) -> dict[str, Any]:
    text = text_of(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
