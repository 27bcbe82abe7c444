"""The data of supervised fine-tuning: token ids with a mask, from the store or from exports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as parquet

from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import ArgumentsNotJson, Tokenizer
from bridle.errors import BridleError
from bridle.reconstruct.exports.selection import ExportReport, Selection, select
from bridle.reconstruct.samples.builders import build
from bridle.reconstruct.samples.sample import Conservation
from bridle.store.reading.queries import Reader
from bridle.store.tree import common_prefix
from bridle.trainer.learner.sft_update import SftExample

_READABLE: Final = "exports as tokens, chat, trl and trl-prompt-completion can be learned from"


class SftDataError(BridleError, ValueError):
    """A training file cannot be read; the message names the line or column."""


def with_context(example: SftExample, tokens: int) -> SftExample:
    """Return ``example`` with at most ``tokens`` tokens before its first learned one.

    The nearest ones are kept.
    """
    start = max(0, int(np.argmax(example.mask)) - tokens)
    return SftExample(example.token_ids[start:], example.mask[start:])


def without_shared(
    examples: Sequence[SftExample], tokens: int, piece: int = 0, seed: int = 0
) -> list[SftExample]:
    """Return the examples without the inside of the beginning and end that all their prompts share.

    A prompt is the tokens before an example's first learned one. Of each shared part, ``tokens``
    tokens are left at each border, and a random piece of the inside, whose length is drawn evenly
    on a logarithmic scale up to ``piece``.
    """
    prompts = [example.token_ids[: int(np.argmax(example.mask))] for example in examples]
    shortest = min((len(prompt) for prompt in prompts), default=0)
    start = min((common_prefix(prompts[0], prompt) for prompt in prompts), default=0)
    end = min((common_prefix(prompts[0][::-1], prompt[::-1]) for prompt in prompts), default=0)
    end = min(end, shortest - start)
    generator = np.random.default_rng(seed)
    found = []
    for example, prompt in zip(examples, prompts, strict=True):
        kept = np.ones(len(example.token_ids), dtype=np.bool_)
        for first, behind in (
            (0, start - tokens),
            (len(prompt) - end + tokens, len(prompt) - tokens),
        ):
            kept[first : max(0, behind)] = False
            if piece and behind > first:
                length = min(int(piece ** generator.random()), behind - first)
                begin = generator.integers(first, behind - length, endpoint=True)
                kept[begin : begin + length] = True
        found.append(SftExample(example.token_ids[kept], example.mask[kept]))
    return found


def examples_from_store(
    reader: Reader,
    selection: Selection,
    left_out: Counter[str],
    accounts: dict[str, Conservation] | None = None,
) -> list[SftExample]:
    """Return the samples of the selected sessions, exactly as they were sampled.

    ``left_out`` counts the sessions that are left out, by reason; ``accounts`` receives the account
    of each session's tokens.
    """
    report = ExportReport(Path())
    found = []
    for session in select(reader, selection, report):
        built = build(session, selection.rules)
        found += [SftExample(sample.token_ids, sample.mask) for sample in built.samples]
        if accounts is not None:
            accounts[session.id] = built.conservation
    left_out.update(report.left_out)
    return found


def is_parquet(path: Path) -> bool:
    """Return whether the file begins as Parquet does, whatever its name."""
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def examples_from_parquet(
    path: Path, *, ids_column: str = "token_ids", mask_column: str = "mask"
) -> list[SftExample]:
    """Read the examples of a tokens+mask Parquet file.

    A row has one list of ids and one of booleans.
    """
    available = parquet.read_schema(path).names
    for column in (ids_column, mask_column):
        if column not in available:
            raise SftDataError(f"{path}: no column {column!r}; there are {', '.join(available)}")
    table = parquet.read_table(path, columns=[ids_column, mask_column])
    rows = zip(table[ids_column].to_pylist(), table[mask_column].to_pylist(), strict=True)
    examples = []
    for number, (ids, mask) in enumerate(rows):
        if len(ids) != len(mask):
            raise SftDataError(
                f"{path}: row {number} has {len(ids)} ids and {len(mask)} mask flags"
            )
        examples.append(
            SftExample(np.asarray(ids, dtype=np.uint32), np.asarray(mask, dtype=np.bool_))
        )
    return [example for example in examples if example.mask.any()]


def examples_from_jsonl(
    path: Path, tokenizer: Tokenizer, left_out: Counter[str]
) -> list[SftExample]:
    """Read the examples of a file of JSON lines.

    A line holds a conversation, ``{"messages": […]}``, or a prompt with its completion, both of
    them messages or both text.

    ``tools`` beside messages are a list, as OpenAI takes them, or JSON text, as TRL does. Lines
    with tool arguments that no template can render are counted in ``left_out``, by reason.
    """
    examples: list[SftExample] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                examples += _examples(_record(line), tokenizer)
            except ArgumentsNotJson:
                left_out["tool_arguments_not_json"] += 1
            except (SftDataError, TemplateError) as error:
                raise SftDataError(f"{path}:{number}: {error}") from error
    return examples


def _record(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SftDataError(f"neither Parquet nor JSON ({error}); {_READABLE}") from error
    if not isinstance(record, dict):
        raise SftDataError(f"not an object; {_READABLE}")
    return record


def _examples(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[SftExample]:
    prompt, completion = record.get("prompt"), record.get("completion")
    if "messages" in record and "timestamp" in record:
        raise SftDataError(f"a timed request of a trace, without its reply; {_READABLE}")
    if "messages" in record:
        messages = _messages(record, "messages")
    elif prompt is None or completion is None:
        raise SftDataError(f"neither messages nor a prompt with its completion; {_READABLE}")
    elif isinstance(prompt, str) and isinstance(completion, str):
        yield example_from_text(prompt, completion, tokenizer)
        return
    elif isinstance(prompt, str) or isinstance(completion, str):
        raise SftDataError("of its prompt and its completion only one is text")
    else:
        context = ({**message, "weight": 0} for message in _messages(record, "prompt"))
        messages = [*context, *_messages(record, "completion")]
    yield from examples_from_chat(messages, _tools(record), tokenizer)


def _messages(record: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = record[name]
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise SftDataError(f"{name}: no list of objects")
    return found


def example_from_text(prompt: str, completion: str, tokenizer: Tokenizer) -> SftExample:
    """Return an example that learns a prompt's completion and the tokenizer's end token.

    The prompt begins as vLLM and TRL let a bare text begin: with the special tokens, if there are
    any, that the tokenizer puts before one.
    """
    end = tokenizer.special_tokens.get("eos_token", "")
    context = [*tokenizer.beginning, *tokenizer.encode(prompt)]
    learned = tokenizer.encode(completion.removesuffix(end) + end)
    mask = [False] * len(context) + [True] * len(learned)
    return SftExample(
        np.asarray(context + learned, dtype=np.uint32), np.asarray(mask, dtype=np.bool_)
    )


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise SftDataError(f"its tools are no list, nor one as JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise SftDataError("its tools are no list, nor one as JSON")
    return tools


def examples_from_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: Tokenizer,
) -> Iterator[SftExample]:
    """Yield token sequences in which exactly the assistant's replies are learned.

    Each reply is tokenised by itself behind its prompt, as the engine produces it, and learned up
    to its end-of-turn token. While the template only appends, all replies share one example; where
    it rewrites the history (drops reasoning), a new example begins. An assistant message with
    ``"weight": 0`` is context only, as in OpenAI's fine-tuning format.
    """
    pieces = _Pieces(tokenizer)
    for index, message in enumerate(messages):
        if message.get("role") != "assistant" or message.get("weight") == 0:
            continue
        prompt = tokenizer.render(messages[:index], tools, add_generation_prompt=True)
        whole = tokenizer.render(messages[: index + 1], tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise SftDataError(
                f"message {index}: the chat template renders this reply differently from its "
                "generation prompt, so the start of the reply is unknown"
            )
        if not prompt.startswith(pieces.text):
            yield pieces.example()
            pieces = _Pieces(tokenizer)
        pieces.add_context(prompt[len(pieces.text) :])
        pieces.add_reply(whole[len(prompt) :])
    if pieces.text:
        yield pieces.example()


class _Pieces:
    """A sequence under construction: its text so far, its ids, and which of them are learned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._mask: list[bool] = []

    def add_context(self, text: str) -> None:
        ids = self._tokenizer.encode(text)
        self.text += text
        self._ids += ids
        self._mask += [False] * len(ids)

    def add_reply(self, text: str) -> None:
        """Append a reply.

        Its last end-of-turn token ends the learned part, because the rest is the template's and not
        the policy's.
        """
        ids = self._tokenizer.encode(text)
        ends = [i for i, token in enumerate(ids) if token in self._tokenizer.eos_token_ids]
        length = ends[-1] + 1 if ends else len(ids)
        self.text += text
        self._ids += ids
        self._mask += [True] * length + [False] * (len(ids) - length)

    def example(self) -> SftExample:
        """Return the sequence up to its last learned token.

        A recording of the conversation holds no more than that.
        """
        length = max((i for i, learned in enumerate(self._mask) if learned), default=-1) + 1
        return SftExample(
            np.asarray(self._ids[:length], dtype=np.uint32),
            np.asarray(self._mask[:length], dtype=np.bool_),
        )
