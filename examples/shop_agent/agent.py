"""A small shop assistant: answers one question about the stock, with tools.

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=… python agent.py "What do 7 axes cost?"

An ordinary LangChain app. It prints the answer on the last line of its output; when it finds none,
it says why on stderr and exits with 1.
"""

import argparse
import json
import operator
import os
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import OpenAIError

SHOP = json.loads(Path(__file__).with_name("shop.json").read_text())
MAX_MODEL_CALLS = 6
OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


@tool
def look_up(item: str, field: str) -> str:
    """The price, stock or weight of an item"""
    entry = SHOP.get(item) or SHOP.get(item.removesuffix("s"))
    if entry is None:
        return "no such item"
    if field not in entry:
        return "no such field"
    return str(entry[field])


@tool
def calculate(a: int, operation: str, b: int) -> str:
    """Add, subtract or multiply two numbers."""
    compute = OPERATIONS.get(operation)
    return "no such operation" if compute is None else str(compute(a, b))


def answer(question: str, stream: bool = False) -> str:
    """Asks the model until it answers without calling a tool; ``""`` when it says nothing."""
    model = ChatOpenAI(
        model=os.environ.get("OPENAI_MODEL", "policy"),
        temperature=float(os.environ.get("SHOP_TEMPERATURE", "1.0")),
        max_tokens=64,
        timeout=60,
        max_retries=1,
        streaming=stream,
    )
    agent = create_agent(
        model,
        [look_up, calculate],
        system_prompt="You help in a shop. Use the tools, then answer with the number.",
    )
    state = agent.invoke(
        {"messages": [("user", question)]},
        # One step for a model call and one for the tools it asked for.
        {"recursion_limit": 2 * MAX_MODEL_CALLS},
    )
    return state["messages"][-1].text.strip()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--stream", action="store_true", help="read the model's reply as it comes")
    arguments = parser.parse_args()
    try:
        found = answer(arguments.question, arguments.stream)
    except GraphRecursionError:
        print(f"no answer within {MAX_MODEL_CALLS} model calls", file=sys.stderr)
        return 1
    except OpenAIError as error:
        print(f"the model did not answer: {error}", file=sys.stderr)
        return 1
    if not found:
        print("the model ended without an answer", file=sys.stderr)
        return 1
    print(found.splitlines()[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
