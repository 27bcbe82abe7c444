"""Test our code that runs inside vLLM, with a stand-in around it: reloads and reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bridle.engine.serve.deltas import Content, Reasoning
from bridle.engine.serve.markup.thinking import ThinkingParser

Inside = Callable[[str], ModuleType]


def checkpoint(directory: Path, *, tied: bool = False, **shapes: tuple[int, ...]) -> Path:
    directory.mkdir(parents=True)
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    save_file(
        {name: torch.zeros(shape) for name, shape in names.items()}, directory / "m.safetensors"
    )
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return directory


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "served", embed=(4, 2), lm_head__weight=(4, 2))


@pytest.fixture
def worker(inside: Inside, served: Path) -> Any:
    module = inside("bridle_worker")
    model = SimpleNamespace(modules=list)
    return module.BridleWorker(
        SimpleNamespace(model=str(served)), SimpleNamespace(get_model=lambda: model)
    )


def test_a_version_of_the_same_model_is_loaded(worker: Any, tmp_path: Path) -> None:
    newer = checkpoint(tmp_path / "v1", embed=(4, 2), lm_head__weight=(4, 2))
    worker.reload_weights(weights_path=str(newer))
    assert worker.loaded == [str(newer)]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"embed": (4, 2)}, "lm_head.weight"),
        ({"embed": (4, 3), "lm_head__weight": (4, 2)}, "embed"),
        ({"embed": (4, 2), "lm_head__weight": (4, 2), "more": (1,)}, "more"),
    ],
)
def test_another_model_is_refused_before_a_layer_is_touched(
    worker: Any, tmp_path: Path, shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    other = checkpoint(tmp_path / "v1", **shapes)
    with pytest.raises(ValueError, match=rf"({words}).*the weights were not changed"):
        worker.reload_weights(weights_path=str(other))
    assert worker.loaded == []


def test_a_tied_output_layer_may_be_left_out(worker: Any, tmp_path: Path) -> None:
    newer = checkpoint(tmp_path / "v1", tied=True, embed=(4, 2))
    worker.reload_weights(weights_path=str(newer))
    assert worker.loaded == [str(newer)]


def test_a_missing_or_cut_checkpoint_is_refused(worker: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors files; the weights were not changed"):
        worker.reload_weights(weights_path=str(tmp_path / "nowhere"))
    cut = checkpoint(tmp_path / "v1", embed=(4, 2), lm_head__weight=(4, 2)) / "m.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    with pytest.raises(ValueError, match="the weights were not changed"):
        worker.reload_weights(weights_path=str(cut.parent))
    assert worker.loaded == []


def test_what_is_served_is_written_down(
    worker: Any, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "served.json"
    worker.remember_version("1")
    assert not note.exists(), "nobody asked for it"
    monkeypatch.setenv("BRIDLE_SERVED_FILE", str(note))
    newer = checkpoint(tmp_path / "v1", embed=(4, 2), lm_head__weight=(4, 2))
    worker.reload_weights(weights_path=str(newer))
    stat = (newer / "m.safetensors").stat()
    expected = {
        "directory": str(newer),
        "version": None,
        "files": [["m.safetensors", stat.st_size, stat.st_mtime_ns]],
    }
    assert json.loads(note.read_text()) == expected
    worker.remember_version("2")
    assert json.loads(note.read_text()) == expected | {"version": "2"}
    worker.rank = 1
    worker.remember_version("3")
    assert json.loads(note.read_text())["version"] == "2", "one worker of several writes"


def test_layers_that_share_a_weight_are_packed_again_and_no_others(inside: Inside) -> None:
    packed: list[Any] = []
    method = SimpleNamespace(process_weights_after_loading=packed.append)
    shared, own = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))
    emptied = torch.nn.Parameter(torch.zeros(0))

    def layer(weight: torch.nn.Parameter, **more: Any) -> Any:
        return SimpleNamespace(_parameters={"weight": weight}, quant_method=method, **more)

    embedding, head = layer(shared, cpu_linear=None), layer(shared, cpu_linear=None)
    others = [
        layer(own, cpu_linear=None),
        layer(emptied, cpu_linear=None),
        layer(emptied, cpu_linear=None),
        SimpleNamespace(_parameters={}),
    ]
    model = SimpleNamespace(modules=lambda: [embedding, *others, head])
    inside("bridle_worker").repack_shared_weights(model)
    assert packed == [embedding, head]


def folded(deltas: list[Any]) -> tuple[str, str]:
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    return reasoning, "".join(delta.text for delta in deltas if isinstance(delta, Content))


@pytest.fixture
def parser(inside: Inside) -> Any:
    return inside("bridle_thinking").BridleThinkingParser


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a"]))
)
def test_vllms_reasoning_is_split_as_our_engines_split_it(parser: Any, pieces: list[str]) -> None:
    ours = ThinkingParser()
    deltas = [delta for piece in pieces for delta in ours.push(piece)] + ours.flush()
    whole_reasoning, whole_content = folded(deltas)
    whole = parser(tokenizer={}).extract_reasoning("".join(pieces), None)
    assert whole == (whole_reasoning or None, whole_content or None)

    streamed, reasoning, content = parser(tokenizer={}), "", ""
    for piece in pieces:
        delta = streamed.extract_reasoning_streaming("", "", piece, [], [], [])
        reasoning += (delta and delta.reasoning) or ""
        content += (delta and delta.content) or ""
    content += streamed.get_streaming_fallback_content("", None) or ""
    assert content == whole_content
    # A stream that ends within "</think>" keeps what it held back of it: text, never tokens.
    assert whole_reasoning.startswith(reasoning)
    assert len(whole_reasoning) - len(reasoning) < len("</think>")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from(["<think>", "</think>", "</th", "ink>", "</", "\n", "a"])))
def test_a_reply_whose_prompt_has_opened_the_reasoning_reasons_until_it_closes_it(
    inside: Inside, pieces: list[str]
) -> None:
    parser = inside("bridle_thinking").BridleOpenThinkingParser
    ours = ThinkingParser(already_open=True)
    deltas = [delta for piece in pieces for delta in ours.push(piece)] + ours.flush()
    reasoning, content = folded(deltas)
    whole = parser(tokenizer={}).extract_reasoning("".join(pieces), None)
    assert whole == (reasoning or None, content or None)


def test_reasoning_tokens_are_those_between_the_tags(parser: Any) -> None:
    counting = parser(tokenizer={"<think>": 1, "</think>": 2})
    assert counting.count_reasoning_tokens([1, 5, 6, 2, 7]) == 2
    assert counting.count_reasoning_tokens([1, 5, 6]) == 2
    assert counting.count_reasoning_tokens([5, 6]) == 0
