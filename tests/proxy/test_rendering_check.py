"""A proxy whose tokenizer or template is not what the engine renders by."""

from __future__ import annotations

import shutil
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import pytest

from bridle.cli.commands.status import status
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer, compile_chat_template
from bridle.engine.serve import generation
from bridle.proxy.engines import rendering
from bridle.proxy.engines.engine import EngineRendering
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.wire.canonical import ApiError
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.audit import audit_session
from bridle.store.records import BreakReason, Note

DIFFERS = Note("tokenizer_differs")
OTHERWISE = "engine_renders_otherwise"
CHAT = "/s/lamp/v1/chat/completions"


class Yesterday(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(days=1)


def turns(bench: Any, count: int, history: list[Any] | None = None, **fields: Any) -> list[Any]:
    """Leads the session's conversation ``count`` calls further; all of its calls."""
    history = [] if history is None else history
    for number in range(count):
        history.append({"role": "user", "content": f"question {number}"})
        body = {"model": "m", "messages": history, **fields}
        reply = httpx.post(bench.url + CHAT, json=body, timeout=30).raise_for_status()
        history.append(reply.json()["choices"][0]["message"])
    return list(bench.calls())


def other_tokenizer(directory: Path, model_dir: Path) -> None:
    train_tokenizer(directory, ["quite another language altogether"] * 4, vocab_size=300)
    # Of a vocabulary that is no smaller: ids beyond it are quarantined, whatever they mean.
    (directory / "config.json").write_text('{"vocab_size": 4096}')


def other_template(directory: Path, model_dir: Path) -> None:
    shutil.copytree(model_dir, directory)
    template = directory / CHAT_TEMPLATE_FILE
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))


def noted(call: Any) -> list[str]:
    return [note.name for note in call.notes]


@pytest.mark.parametrize("make", [other_tokenizer, other_template])
def test_an_engine_that_renders_otherwise_is_named_and_never_continued_exactly(
    stage: Any,
    start_proxy: Any,
    tmp_path: Path,
    model_dir: Path,
    make: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "other", model_dir)
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=tmp_path / "other")
    calls = turns(bench, 3)
    for request in stage.requests:
        tokenizer = request.tokenizer
        rendered = tokenizer.encode(tokenizer.render(request.messages, request.tools))
        assert list(request.prompt_ids) == rendered
    assert [noted(call) for call in calls] == [[OTHERWISE]] * 3
    assert "on the engine has" in calls[0].notes[0].detail
    assert {call.break_reason for call in calls} <= {None, BreakReason.ENGINE_RENDERS_OTHERWISE}
    assert not audit_session(bench.reader, calls[0].session_id).violations
    (engine,) = httpx.get(f"{bench.url}/bridle/v1/engines").json()
    assert f"(call {calls[0].id})" in engine["rendering_difference"]
    status(bench.url, None)
    assert "not continued exactly" in capsys.readouterr().out
    metrics = httpx.get(f"{bench.url}/metrics").text
    assert f'bridle_events_total{{name="{OTHERWISE}"}} 3.0' in metrics
    assert f'bridle_engine_renders_otherwise{{engine="{engine["name"]}"}} 1.0' in metrics


def test_a_renderer_that_only_real_calls_show_is_noticed(
    stage: Any, start_proxy: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine acts like vLLM for gpt-oss.

    It tokenises by the template and renders calls by other code.
    """
    render = generation.render

    def otherwise(*args: Any, **kwargs: Any) -> str:
        return "Knowledge cutoff: 2024-06\n" + render(*args, **kwargs)

    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    probe = list(rendering.PROBE)
    served = httpx.post(
        f"{stage.engine.base_url}/tokenize", json={"model": "tiny-policy", "messages": probe}
    ).json()["tokens"]
    tokenizer = Tokenizer(model_dir)
    assert served == tokenizer.encode(tokenizer.render(probe))
    monkeypatch.setattr("bridle.engine.serve.chat.render", otherwise, raising=False)
    monkeypatch.setattr("bridle.engine.serve.generation.render", otherwise)
    calls = turns(bench, 2)
    assert [noted(call) for call in calls] == [[OTHERWISE]] * 2


def test_equal_prompts_are_not_noted_and_calls_go_on_exactly(
    stage: Any, start_proxy: Any, model_dir: Path
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    calls = turns(bench, 3, tools=[tool])
    assert [noted(call) for call in calls] == [[], [], []]
    assert {call.break_reason for call in calls} == {None}
    assert httpx.get(f"{bench.url}/bridle/v1/engines").json()[0]["rendering_difference"] == ""


def test_only_an_engine_that_was_connected_to_anew_is_believed_again() -> None:
    engine = EngineRendering()
    engine.found("", 0)
    assert engine.agrees
    engine.found("its prompts differ", 1)
    engine.found("", 1)
    assert (engine.agrees, engine.difference) == (False, "its prompts differ")
    engine.found("", 2)
    assert (engine.agrees, engine.difference) == (True, "")


def test_each_shape_of_a_prompt_is_compared_once_until_the_template_may_have_changed() -> None:
    engine = EngineRendering()
    assert engine.due(0, "plain")
    assert not engine.due(0, "plain")
    assert engine.due(0, "tools")
    assert not engine.due(0, "tools")
    assert engine.due(1, "plain")


def test_a_renderer_that_only_tools_show_is_noticed_after_a_session_without_tools(
    stage: Any, start_proxy: Any, tmp_path: Path, model_dir: Path
) -> None:
    """The model has one template for chats and another one for chats with tools."""
    shutil.copytree(model_dir, tmp_path / "other")
    template = tmp_path / "other" / CHAT_TEMPLATE_FILE
    template.write_text("{% if tools %}Tools!{% endif %}" + template.read_text())
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=tmp_path / "other")
    assert [noted(call) for call in turns(bench, 2)] == [[], []]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    calls = turns(bench, 2, tools=[tool])
    assert [noted(call) for call in calls[2:]] == [[OTHERWISE]] * 2


def test_a_template_that_a_publish_changes_is_compared_again(
    stage: Any, start_proxy: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    assert [noted(call) for call in turns(bench, 2)] == [[], []]
    template = (model_dir / CHAT_TEMPLATE_FILE).read_text()
    served = stage.engine.backend.tokenizer
    changed = compile_chat_template(template.replace("<|im_start|>", "<|im_start|> "))
    monkeypatch.setitem(served.__dict__, "_compiled", changed)
    reply = httpx.put(f"{bench.url}/bridle/v1/policy", json={"version": 1})
    reply.raise_for_status()
    assert [noted(call)[0] for call in turns(bench, 2)[2:]] == [OTHERWISE] * 2


@pytest.mark.parametrize("error", [TemplateError("a role"), TypeError("a text")])
async def test_a_prompt_that_cannot_be_rendered_here_is_noted_and_its_call_goes_on(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def render(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(Tokenizer, "render", render)
    state = EngineRendering()
    engine: Any = SimpleNamespace(
        name="engine",
        transport=SimpleNamespace(connection_epoch=1),
        serves=SimpleNamespace(publishes=0),
        rendering=state,
    )
    fields = {"messages": [{"role": "user", "content": "hi"}]}
    ask: Any = SimpleNamespace(path="/v1/chat/completions", fields=fields)
    check = rendering.RenderingCheck(Tokenizer(model_dir))
    note = await check.compare(engine, ask, [1], "call_1", time.time())
    assert note == Note("rendering_uncompared", type(error).__name__)
    assert (state.agrees, state.difference) == (False, "")


# A session that another process began: no prompt of it has been compared here.


@pytest.fixture
def mistaken(stage: Any, start_proxy: Any, tmp_path: Path, model_dir: Path) -> Any:
    """A proxy that was given another template than the engine has, and takes a session up."""
    other_template(tmp_path / "other", model_dir)
    return start_proxy(stage.engine.base_url, tokenizer_dir=tmp_path / "other")


@pytest.fixture
def begun(bench: Any) -> list[Any]:
    """The history of the session that a proxy without a tokenizer began."""
    history: list[Any] = []
    turns(bench, 1, history)
    return history


def test_a_session_of_another_process_is_not_continued_with_another_models_ids(
    begun: list[Any], mistaken: Any
) -> None:
    calls = turns(mistaken, 2, begun)
    assert [noted(call) for call in calls] == [[], ["tokenizer_differs"], ["tokenizer_differs"]]


def test_an_engine_that_returns_no_ids_of_a_text_is_believed(
    begun: list[Any],
    stage: Any,
    start_proxy: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridle.proxy.engines.engine.TOKENIZE", "/nothing/here")
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    calls = turns(bench, 2, begun)
    assert [call.notes for call in calls] == [()] * 3


def test_an_engine_that_cannot_tell_just_now_is_asked_at_the_next_call(
    begun: list[Any], mistaken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*_: object) -> None:
        raise ApiError("upstream_unreachable", "not now", status=502)

    with monkeypatch.context() as patch:
        patch.setattr(EnginePool, "tokenize", unreachable)
        assert DIFFERS not in turns(mistaken, 1, begun)[-1].notes
    assert DIFFERS in turns(mistaken, 1, begun)[-1].notes


def test_an_engine_that_disagreed_is_asked_again(
    begun: list[Any],
    mistaken: Any,
    stage: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert DIFFERS in turns(mistaken, 1, begun)[-1].notes
    template = (model_dir / CHAT_TEMPLATE_FILE).read_text()
    served = stage.requests[0].tokenizer
    monkeypatch.setitem(
        served.__dict__,
        "_compiled",
        compile_chat_template(template.replace("<|im_start|>", "<|im_start|> ")),
    )
    assert DIFFERS in turns(mistaken, 1, begun)[-1].notes, "not at once"
    monkeypatch.setattr("bridle.proxy.engines.rendering._AGAIN_S", 0.0)
    assert DIFFERS not in turns(mistaken, 1, begun)[-1].notes


def test_a_template_that_tells_the_date_agrees_on_a_later_day_too(
    stage: Any, start_proxy: Any, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n"
    shutil.copytree(model_dir, tmp_path / "dated")
    template = tmp_path / "dated" / CHAT_TEMPLATE_FILE
    template.write_text(today + template.read_text())
    with monkeypatch.context() as before:
        before.setattr("bridle.engine.contract.tokenizer.datetime", Yesterday)
        bench = start_proxy(stage.engine.base_url, tokenizer_dir=tmp_path / "dated")
    served = stage.engine.backend.tokenizer
    monkeypatch.setitem(served.__dict__, "_compiled", compile_chat_template(template.read_text()))
    calls = turns(bench, 3)
    assert [call.notes for call in calls] == [()] * 3
    assert {call.break_reason for call in calls} == {None}
