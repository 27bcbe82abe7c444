"""A small shell agent on the OpenAI Agents SDK.

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=… python agent.py "What is in here?"

It prints its answer. ``--api`` chooses the provider's API, ``--stream`` reads replies as they come.
"""

import argparse
import asyncio
import os
import subprocess
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
MAX_TURNS = 64


@function_tool
def shell(command: str) -> str:
    """Run a shell command in the working directory and return what it prints."""
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    return ended.stdout + ended.stderr


async def answer(task: str, api: str, stream: bool) -> str:
    model = MODELS[api](os.environ.get("OPENAI_MODEL", "policy"), AsyncOpenAI())
    agent = Agent(
        name="Shell",
        instructions="Do the task with the shell, then answer in one line.",
        model=model,
        tools=[shell],
    )
    if not stream:
        return str((await Runner.run(agent, task, max_turns=MAX_TURNS)).final_output)
    running = Runner.run_streamed(agent, task, max_turns=MAX_TURNS)
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("--api", choices=sorted(MODELS), default="responses")
    parser.add_argument("--stream", action="store_true")
    arguments = parser.parse_args()
    set_tracing_disabled(True)
    print(asyncio.run(answer(arguments.task, arguments.api, arguments.stream)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
