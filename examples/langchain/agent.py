"""A small shell agent on LangChain.

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=… python agent.py "What is in here?"

It prints its answer. ``--api`` chooses the provider's API, ``--stream`` reads replies as they come.
"""

import argparse
import os
import subprocess
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MAX_STEPS = 128


@tool
def shell(command: str) -> str:
    """Run a shell command in the working directory and return what it prints."""
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    return ended.stdout + ended.stderr


def answer(task: str, api: str, stream: bool) -> str:
    model = ChatOpenAI(
        model=os.environ.get("OPENAI_MODEL", "policy"),
        use_responses_api=api == "responses",
        streaming=stream,
        timeout=60,
    )
    agent = create_agent(
        model, [shell], system_prompt="Do the task with the shell, then answer in one line."
    )
    state = agent.invoke({"messages": [("user", task)]}, {"recursion_limit": MAX_STEPS})
    return state["messages"][-1].text.strip()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("--api", choices=["chat", "responses"], default="chat")
    parser.add_argument("--stream", action="store_true")
    arguments = parser.parse_args()
    print(answer(arguments.task, arguments.api, arguments.stream))
    return 0


if __name__ == "__main__":
    sys.exit(main())
