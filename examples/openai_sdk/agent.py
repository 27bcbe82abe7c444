"""A small agent on OpenAI's own SDK: one tool, called until the model answers.

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=… python agent.py "Weather in Oslo"

It needs nothing but `pip install openai`, and prints the answer on its last line.
"""

import json
import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

MAX_STEPS = 16
WEATHER = {"Berlin": "rain, 11 °C", "Oslo": "snow, -3 °C", "Rome": "sun, 24 °C"}
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def answer(question: str) -> str:
    """The model's answer to ``question``, after as many tool calls as it asks for."""
    client = OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for _ in range(MAX_STEPS):
        reply = client.chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "policy"), messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            city = json.loads(call.function.arguments).get("city", "")
            result = WEATHER.get(city, f"no report for {city}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer"


if __name__ == "__main__":
    print(answer(" ".join(sys.argv[1:]) or "What is the weather in Oslo?"))
