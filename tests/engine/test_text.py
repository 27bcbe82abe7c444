"""Test the way from token ids to the client's text: detokenising, stop strings, reasoning."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers, trainers

from bridle.engine.contract.detokenizer import Vocabulary
from bridle.engine.contract.tokenizer import Tokenizer, token_bytes
from bridle.engine.serve.deltas import Content, Reasoning
from bridle.engine.serve.markup.thinking import ThinkingParser
from bridle.engine.serve.stopping import StopScanner


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(ids=st.lists(st.integers(0, 500), max_size=60))
def test_pieces_of_byte_level_tokens_add_up_to_the_tokenizers_own_text(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    detokenizer = Vocabulary(tokenizer).detokenizer(())
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


def test_special_tokens_are_hidden_and_markup_is_not(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("<|im_start|>look <tool_call> the<|im_end|>")
    detokenizer = vocabulary.detokenizer(vocabulary.special_ids)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == "look <tool_call> the"


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    text = "naïve 日本 😀 end"
    detokenizer = Vocabulary(tokenizer).detokenizer(())
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece-like tokenizer: leading-space marks, unknown characters as byte tokens."""
    directory = tmp_path_factory.mktemp("metaspace")
    backend = BackendTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(
        ["look the key up then add what it says to seven and answer"] * 10,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>", *byte_tokens], show_progress=False
        ),
    )
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.mark.parametrize("text", ["look the key up", "add 😀 to it", "日本", "  two  spaces ", "é"])
def test_other_tokenizers_pieces_add_up_too(metaspace: Tokenizer, text: str) -> None:
    ids = metaspace.encode(text)
    detokenizer = Vocabulary(metaspace).detokenizer(())
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == metaspace.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_a_stop_string_is_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    def scan(pieces: list[str]) -> tuple[str, str | None]:
        scanner = StopScanner(stops)
        released = "".join(scanner.push(piece) for piece in pieces)
        return released + scanner.flush(), scanner.matched

    released, matched = scan(cut(text, cuts))
    assert (released, matched) == scan([text])
    if matched is None:
        assert released == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(released + matched)


def test_a_stop_string_can_be_included() -> None:
    scanner = StopScanner(["END"], include=True)
    assert scanner.push("one EN") + scanner.push("D two") == "one END"


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", "\n", "a", "b c"]), max_size=8
    ).map("".join),
    st.lists(st.integers(0, 40), max_size=8),
    st.booleans(),
)
def test_reasoning_is_split_off_however_the_text_is_cut(
    text: str, cuts: list[int], already_open: bool
) -> None:
    def split(pieces: list[str]) -> tuple[str, str]:
        parser = ThinkingParser(already_open=already_open)
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.flush()
        return (
            "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
            "".join(delta.text for delta in deltas if isinstance(delta, Content)),
        )

    assert split(cut(text, cuts)) == split([text])


@pytest.mark.parametrize(
    ("text", "already_open", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "\nhm\n", "\n\nyes"),
        ("hm</think>yes", True, "hm", "yes"),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("<think>cut off", False, "cut off", ""),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning_and_content(text: str, already_open: bool, reasoning: str, content: str) -> None:
    parser = ThinkingParser(already_open=already_open)
    deltas = parser.push(text) + parser.flush()
    assert "".join(d.text for d in deltas if isinstance(d, Reasoning)) == reasoning
    assert "".join(d.text for d in deltas if isinstance(d, Content)) == content


def test_tokens_are_the_bytes_that_they_add_to_a_text(tokenizer):
    text = 'say "é" and\n\tthen <|im_end|>'
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.vocabulary()[id] for id in ids).decode() == text


def test_pieces_of_a_sentencepiece_vocabulary_are_told_from_byte_level_ones():
    backend = BackendTokenizer(models.BPE({"\u2581the": 0, "<0x0A>": 1, "日": 2}, []))
    backend.add_special_tokens(["<eos>"])
    assert token_bytes(backend) == [b" the", b"\n", "日".encode(), b"<eos>"]


@pytest.mark.parametrize(
    ("generation", "config", "others"),
    [
        (None, {}, []),
        (None, {"eos_token_id": None}, []),
        (None, {"eos_token_id": 5}, [5]),
        (None, {"eos_token_id": [2, 5, 6]}, [5, 6]),
        (None, {"text_config": {"eos_token_id": 7}}, [7]),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, [0]),
        ({"eos_token_id": [0, 2]}, {"eos_token_id": 5}, [0]),
        ({"temperature": 0.6}, {"eos_token_id": 5}, []),
    ],
)
def test_what_ends_a_reply_is_told_as_vllm_has_it(
    tiny_dir: Path,
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    others: list[int],
) -> None:
    """The tokenizer's own end always does; the rest is transformers' generation configuration."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_dir / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {tokenizer.token_id("<|im_end|>"), *others}
