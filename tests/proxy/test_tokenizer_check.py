"""A proxy that was given another tokenizer or template than the engine has."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from bridle.engine.contract.tokenizer import CHAT_TEMPLATE_FILE, compile_chat_template
from bridle.proxy.engines.pool import EnginePool
from bridle.proxy.wire.canonical import ApiError
from bridle.reconstruct.audit import audit_session
from bridle.store.records import BreakReason, Note
from bridle.trainer.policy.tiny_tokenizer import train_tokenizer

DIFFERS = Note("tokenizer_differs")
CHAT = "/s/lamp/v1/chat/completions"


class Yesterday(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(days=1)


def turns(bench: Any, count: int) -> list[Any]:
    history: list[dict[str, Any]] = []
    for number in range(count):
        history.append({"role": "user", "content": f"question {number}"})
        body = {"model": "m", "messages": history}
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


@pytest.mark.parametrize("make", [other_tokenizer, other_template])
def test_nothing_is_continued_with_what_another_model_reads_by(
    stage: Any, start_proxy: Any, tmp_path: Path, model_dir: Path, make: Any
) -> None:
    make(tmp_path / "other", model_dir)
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=tmp_path / "other")
    calls = turns(bench, 3)
    for request in stage.requests:
        tokenizer = request.tokenizer
        rendered = tokenizer.encode(tokenizer.render(request.messages, request.tools))
        assert list(request.prompt_ids) == rendered
    noted = [DIFFERS in call.notes for call in calls]
    assert noted == [False, True, True]
    assert {call.break_reason for call in calls} <= {None, BreakReason.TOKENIZER_DIFFERS}
    assert not audit_session(bench.reader, calls[0].session_id).violations


def test_an_engine_that_tells_no_ids_of_a_text_is_believed(
    stage: Any, start_proxy: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.proxy.engines.endpoint.TOKENIZE", "/nothing/here")
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    calls = turns(bench, 3)
    assert [call.notes for call in calls] == [()] * 3


@pytest.fixture
def mistaken(stage: Any, start_proxy: Any, tmp_path: Path, model_dir: Path) -> Any:
    """A proxy that was given another template than the engine has."""
    other_template(tmp_path / "other", model_dir)
    return start_proxy(stage.engine.base_url, tokenizer_dir=tmp_path / "other")


def test_an_engine_that_cannot_tell_just_now_is_asked_at_the_next_call(
    mistaken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*_: object) -> None:
        raise ApiError("upstream_unreachable", "not now", status=502)

    with monkeypatch.context() as patch:
        patch.setattr(EnginePool, "tokenize", unreachable)
        assert DIFFERS not in turns(mistaken, 2)[-1].notes
    assert DIFFERS in turns(mistaken, 2)[-1].notes


def test_an_engine_that_disagreed_is_asked_again(
    mistaken: Any, stage: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DIFFERS in turns(mistaken, 2)[-1].notes
    template = (model_dir / CHAT_TEMPLATE_FILE).read_text()
    served = stage.requests[0].tokenizer
    monkeypatch.setitem(
        served.__dict__,
        "_compiled",
        compile_chat_template(template.replace("<|im_start|>", "<|im_start|> ")),
    )
    assert DIFFERS in turns(mistaken, 2)[-1].notes, "not at once"
    monkeypatch.setattr("bridle.proxy.engines.tokenizer_check._AGAIN_S", 0.0)
    assert DIFFERS not in turns(mistaken, 2)[-1].notes


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
