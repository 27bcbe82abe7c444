"""Runs with vLLM's python: builds the parsers that were chosen and has them parse samples.

    python parse_samples.py REASONING_PLUGIN TOOL_PLUGIN < cases.json > replies.json

A case is ``{directory, tool, reasoning, prompt, reply}``. Each parser is built as vLLM's server
builds it at its start and for a request, with the model's own tokenizer; the reply goes through it
whole, and token by token as a stream.
"""

from __future__ import annotations

import json
import sys
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("look_up", "count_up")
]


def parsed(case: dict[str, Any]) -> dict[str, Any]:
    """Return the findings of the chosen parsers in the case's reply, whole and streamed."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    tokenizer = AutoTokenizer.from_pretrained(case["directory"])
    parser_class = ParserManager.get_parser(
        tool_parser_name=case["tool"],
        reasoning_parser_name=case["reasoning"],
        enable_auto_tools=case["tool"] is not None,
        is_harmony=case["tool"] == "openai",
        tokenizer=tokenizer,
    )
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "hi"}], tools=TOOLS
    )
    prompt = tokenizer.encode(case["prompt"], add_special_tokens=False)
    ids = tokenizer.encode(case["reply"], add_special_tokens=False)

    def build() -> Any:
        parser = parser_class(tokenizer, request.tools, chat_template_kwargs=case["arguments"])
        parser.adjust_request(request)
        parser.set_prompt_token_ids(prompt)
        return parser

    parser = build()
    skip = request.skip_special_tokens
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    reasoning, content, calls = parser.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=ids
    )
    whole = {
        "reasoning": reasoning,
        "content": content,
        "calls": [[call.name, call.arguments] for call in calls or ()],
    }
    parser, streamed = build(), {"reasoning": "", "content": "", "calls": []}
    shown = ""
    for at, token_id in enumerate(ids):
        now = tokenizer.decode(ids[: at + 1], skip_special_tokens=skip)
        piece, shown = ("", shown) if now.endswith("\ufffd") else (now[len(shown) :], now)
        delta = parser.parse_delta(
            piece, [token_id], request, prompt_token_ids=prompt, finished=at + 1 == len(ids)
        )
        if delta is None:
            continue
        streamed["reasoning"] += delta.reasoning or ""
        streamed["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            while len(streamed["calls"]) <= call.index:
                streamed["calls"].append(["", ""])
            streamed["calls"][call.index][0] += call.function.name or ""
            streamed["calls"][call.index][1] += call.function.arguments or ""
    return {"whole": whole, "streamed": streamed}


def registered() -> dict[str, list[str]]:
    """The names of every parser that this vLLM knows."""
    from vllm.reasoning import _REASONING_PARSERS_TO_REGISTER
    from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER

    return {
        "tool": sorted(_TOOL_PARSERS_TO_REGISTER),
        "reasoning": sorted(_REASONING_PARSERS_TO_REGISTER),
    }


def main() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    ReasoningParserManager.import_reasoning_parser(sys.argv[1])
    ToolParserManager.import_tool_parser(sys.argv[2])
    found: dict[str, Any] = {}
    for name, case in json.load(sys.stdin).items():
        try:
            found[name] = parsed(case)
        except Exception as error:  # noqa: BLE001 - reported with the case's name
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    json.dump({"registered": registered(), "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
