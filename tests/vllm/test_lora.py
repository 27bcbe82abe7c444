"""The check that a vLLM takes adapters (real ones: test_real_adapters, test_real_tied)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from bridle.engine.contract.client import EngineRefused
from bridle.engine.serve.transport import ServerThread
from bridle.engine.vllm import VllmLora


async def closed(scope: Any, _receive: Any, send: Any) -> None:
    """A vLLM with --enable-lora, and without the routes that load adapters."""
    told = scope["path"] == "/server_info"
    body = {"vllm_config": {"lora_config": {"max_lora_rank": 16}}} if told else {}
    await send({"type": "http.response.start", "status": 200 if told else 404, "headers": []})
    await send({"type": "http.response.body", "body": orjson.dumps(body)})


def test_a_vllm_whose_adapters_are_those_of_its_start_is_refused() -> None:
    server = ServerThread(closed, host="127.0.0.1", port=0)
    server.start()
    try:
        with (
            VllmLora(server.base_url) as engine,
            pytest.raises(EngineRefused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ):
            engine.require_lora(8)
    finally:
        server.stop()
