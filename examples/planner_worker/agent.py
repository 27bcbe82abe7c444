"""A planner and a worker: one says who in a note works, the other looks up the job of each.

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=… python agent.py \
        "Eva works as a tailor. Ben lives in Rome. Tom works as a baker."

An ordinary app on the OpenAI SDK. Both roles ask the same model, each in a conversation of its own,
which it names in the header ``thread-id``. The last line of the output is the list of jobs.
"""

import argparse
import os
import sys

from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessage

MOST_JOBS = 4
"""More names than this are not looked up, whatever the planner says."""


def ask_for_names(note: str) -> str:
    return f"{note} Who works? Reply with the names, separated by commas."


def ask_for_job(note: str, name: str) -> str:
    return f"{note} What is {name}'s job? Reply with one word."


_EXAMPLE = "Ann works as a miner. Max lives in Bonn. Kim works as a sailor."
PLAN_EXAMPLE = (ask_for_names(_EXAMPLE), "Ann, Kim")
WORK_EXAMPLE = (ask_for_job(_EXAMPLE, "Kim"), "sailor")


class Role:
    """One conversation with the model, which begins with an example."""

    def __init__(self, name: str, example: tuple[str, str]) -> None:
        self._client = OpenAI(default_headers={"thread-id": name}, timeout=600, max_retries=1)
        question, answer = example
        self._conversation: list[dict[str, str] | ChatCompletionMessage] = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def ask(self, question: str, max_tokens: int) -> str:
        self._conversation.append({"role": "user", "content": question})
        completion = self._client.chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "policy"),
            messages=self._conversation,
            max_tokens=max_tokens,
        )
        reply = completion.choices[0].message
        self._conversation.append(reply)
        return " ".join((reply.content or "").split())


def jobs(note: str) -> list[tuple[str, str]]:
    """The names that the planner gives, each with the worker's words for the job."""
    planner = Role("planner", PLAN_EXAMPLE)
    plan = planner.ask(ask_for_names(note), max_tokens=16)
    names = [name for part in plan.split(",") if (name := part.strip(" ."))]
    worker = Role("worker", WORK_EXAMPLE)
    return [(name, worker.ask(ask_for_job(note, name), max_tokens=8)) for name in names[:MOST_JOBS]]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("note")
    try:
        found = jobs(parser.parse_args().note)
    except OpenAIError as error:
        print(f"the model did not answer: {error}", file=sys.stderr)
        return 1
    print(" | ".join(f"{name}: {job}" for name, job in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
