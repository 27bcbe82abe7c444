"""vLLM's server asks for the key on every route: its middleware alone, and in a real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from bridle.engine.vllm import VllmOptions, VllmServer
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import CHATML_TOOLS_TEMPLATE, train_tokenizer

OPEN, CLOSED = "/health", ("/pause", "/collective_rpc", "/v1/models", "/metrics", "/")


async def here(_: Request) -> PlainTextResponse:
    return PlainTextResponse("here")


async def test_only_health_answers_without_the_key(
    inside: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sesame")
    monkeypatch.setenv("BRIDLE_GUARD_KEY_FILE", str(tmp_path / "key"))
    app = Starlette(routes=[Route(path, here) for path in (OPEN, *CLOSED)])
    guarded = inside("bridle_guard").RequireKey(app)
    transport = httpx.ASGITransport(app=guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        assert (await client.get(OPEN)).status_code == 200
        for path in CLOSED:
            assert (await client.get(path)).status_code == 401
            wrong = {"authorization": "Bearer sesam"}
            assert (await client.get(path, headers=wrong)).status_code == 401
            right = {"authorization": "Bearer sesame"}
            assert (await client.get(path, headers=right)).status_code == 200


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_real_vllm_pauses_and_samples_for_the_key_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    size = train_tokenizer(model, [CHATML_TOOLS_TEMPLATE], vocab_size=400)
    shape = TinyShape(hidden=64, layers=1, heads=2, kv_heads=1, intermediate=64, context=256)
    make_policy(model, shape, vocab_size=size, seed=0)
    options = VllmOptions(max_model_len=256, cpu_kv_cache_gib=1)
    with VllmServer(model, tmp_path / "vllm", options=options, api_key="sesame") as server:
        for method, path in (
            ("POST", "/pause"),
            ("POST", "/collective_rpc"),
            ("GET", "/v1/models"),
        ):
            refused = httpx.request(method, f"{server.base_url}{path}", trust_env=False)
            assert refused.status_code == 401, path
            headers = {"authorization": "Bearer sesame"}
            asked = httpx.request(
                method, f"{server.base_url}{path}", headers=headers, trust_env=False
            )
            assert asked.status_code != 401, path
        assert server.pid is not None
        environments = [path.read_bytes() for path in environments_below(server.pid)]
        assert len(environments) > 1, "the server, and its engine"
        assert not any(b"sesame" in one for one in environments)


def environments_below(process: int) -> list[Path]:
    """Return the environments of a process and of those that it started."""
    children = Path(f"/proc/{process}/task").glob("*/children")
    below = [int(child) for file in children for child in file.read_text().split()]
    own = Path(f"/proc/{process}/environ")
    return [own, *(path for child in below for path in environments_below(child))]
