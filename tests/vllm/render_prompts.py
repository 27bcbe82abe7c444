"""Runs with vLLM's python: renders chat requests as vLLM's server does, without weights.

    python render_prompts.py < cases.json > prompts.json

A case is ``{directory, model_type, requests}``, a request the body of ``/v1/chat/completions``.
For each request the reply has the prompt's ids, or ``{"refused": REASON}``. The server's own
renderer makes them: Harmony for gpt-oss, a model's own tokenizer where vLLM has one, else the chat
template.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

OWN_TOKENIZERS = ("deepseek_v32", "deepseek_v4")
"""Model types for which vLLM takes a tokenizer mode of its own (``ModelConfig``)."""


class Prompts:
    """The prompts of one model directory."""

    def __init__(self, directory: str, model_type: str) -> None:
        from vllm.renderers.deepseek_v4 import DeepseekV4Renderer
        from vllm.renderers.deepseek_v32 import DeepseekV32Renderer
        from vllm.renderers.hf import HfRenderer
        from vllm.tokenizers.registry import get_tokenizer

        own = model_type in OWN_TOKENIZERS
        self.harmony = model_type == "gpt_oss"
        self.tokenizer = get_tokenizer(directory, tokenizer_mode=model_type if own else "hf")
        self.model_config = SimpleNamespace(
            model=directory,
            tokenizer=directory,
            revision=None,
            code_revision=None,
            tokenizer_revision=None,
            trust_remote_code=False,
            hf_config=SimpleNamespace(model_type=model_type),
            multimodal_config=None,
            enable_prompt_embeds=False,
            is_multimodal_model=False,
            allowed_local_media_path="",
            allowed_media_domains=None,
        )
        renderers = {"deepseek_v32": DeepseekV32Renderer, "deepseek_v4": DeepseekV4Renderer}
        self.renderer_class = renderers.get(model_type, HfRenderer)
        self.renderer = SimpleNamespace(
            model_config=self.model_config,
            get_tokenizer=lambda: self.tokenizer,
            use_unified_vision_chunk=False,
            _apply_chat_template=lambda *a, **k: self.tokenizer.apply_chat_template(*a, **k),
        )

    def ids(self, body: dict[str, Any]) -> list[int]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate(body)
        return self._by_harmony(request) if self.harmony else self._by_template(request)

    def _by_harmony(self, request: Any) -> list[int]:
        from vllm.renderers.online_renderer import OnlineRenderer

        server = SimpleNamespace(
            renderer=self.renderer, supports_browsing=False, supports_code_interpreter=False
        )
        make = OnlineRenderer._make_request_with_harmony
        _, (prompt,) = make(server, request, request.tools is not None)
        return list(prompt["prompt_token_ids"])

    def _by_template(self, request: Any) -> list[int]:
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(None, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        _, prompt = self.renderer_class.render_messages(self.renderer, request.messages, params)
        special = request.add_special_tokens
        return list(self.tokenizer.encode(prompt["prompt"], add_special_tokens=special))


def main() -> None:
    found: dict[str, Any] = {}
    for name, case in json.load(sys.stdin).items():
        prompts, found[name] = Prompts(case["directory"], case["model_type"]), []
        for body in case["requests"]:
            try:
                found[name].append(prompts.ids(body))
            except Exception as error:  # noqa: BLE001 - refusals are results here
                found[name].append({"refused": f"{type(error).__name__}: {error}"})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
