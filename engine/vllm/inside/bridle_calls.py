"""Tool parsers, by Bridle's readers, for markup that vLLM's own parsers do not read, or misread.

vLLM loads them with ``--tool-parser-plugin``. vLLM 0.32 has no parser for ``<TOOLCALL>`` and
``<function=NAME>{…}``, reads a ``[CALL_ID]`` of Mistral's as a part of the name, and does not start
its Llama parser without the token ``<|python_tag|>``. The readers are those of Bridle's other
engines (``engine/serve/markup``); nothing else of Bridle is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

PREFIX = "bridle_"
MARKUP = ("llama_json", "mistral", "nemotron_v2", "functionary")


def _import_bridle() -> None:
    """Make the package around this file importable, whatever environment it is installed in."""
    if "bridle" in sys.modules:
        return
    root = Path(__file__).parents[3]
    spec = spec_from_file_location(
        "bridle", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no package in {root}")
    sys.modules["bridle"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


_import_bridle()
from bridle.engine.serve.deltas import Content, Delta, ToolArguments, ToolName  # noqa: E402
from bridle.engine.serve.markup import reader  # noqa: E402


class BridleToolParser(ToolParser):  # type: ignore[misc]  # vLLM is not installed here
    """A tool parser. When streaming, vLLM makes one per reply."""

    markup = ""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._reader = reader(self.markup, [tool.model_dump() for tool in self.tools])

    def adjust_request(self, request: Any) -> Any:
        request = super().adjust_request(request)
        if request.tools and request.tool_choice != "none":
            # The markup may be special tokens, which a reader needs to see.
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        whole = reader(self.markup, [tool.model_dump() for tool in self.tools])
        content, calls = "", list[list[str]]()
        for delta in (*whole.push(model_output), *whole.flush()):
            if isinstance(delta, Content):
                content += delta.text
            elif isinstance(delta, ToolName):
                calls.append([delta.id or make_tool_call_id(), delta.name, ""])
            elif isinstance(delta, ToolArguments):
                calls[delta.index][2] += delta.text
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[
                ToolCall(id=id, function=FunctionCall(name=name, arguments=arguments))
                for id, name, arguments in calls
            ],
            content=content or None,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        deltas: list[Delta] = self._reader.push(delta_text)
        content, calls = "", list[DeltaToolCall]()
        for delta in deltas:
            if isinstance(delta, Content):
                content += delta.text
            elif isinstance(delta, ToolName):
                self.prev_tool_call_arr.append({"name": delta.name, "arguments": ""})
                self.streamed_args_for_tool.append("")
                calls.append(
                    DeltaToolCall(
                        index=delta.index,
                        id=delta.id or make_tool_call_id(),
                        type="function",
                        function=DeltaFunctionCall(name=delta.name, arguments=""),
                    )
                )
            elif isinstance(delta, ToolArguments):
                self.streamed_args_for_tool[delta.index] += delta.text
                self.prev_tool_call_arr[delta.index]["arguments"] += delta.text
                function = DeltaFunctionCall(arguments=delta.text)
                calls.append(DeltaToolCall(index=delta.index, function=function))
        if not content and not calls:
            return None
        return DeltaMessage(content=content or None, tool_calls=calls)


for _name in MARKUP:
    ToolParserManager.register_module(
        PREFIX + _name, module=type(f"Bridle_{_name}", (BridleToolParser,), {"markup": _name})
    )
