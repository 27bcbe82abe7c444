"""A small clerk: reads notes about people and lists their jobs, with one question for each note.

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=… python agent.py \
        "Eva lives in Rome with a nurse and works as a tailor. Tom works as a baker."

An ordinary LangChain app; all questions are in one conversation, which begins with an example. It
prints the list on the last line of its output.
"""

import argparse
import os
import sys

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_openai import ChatOpenAI
from openai import OpenAIError

EXAMPLE = ("Ann lives in Bonn with a miner and works as a sailor", "sailor")


def question(note: str) -> HumanMessage:
    return HumanMessage(f"{note}. What is {note.split()[0]}'s job? Reply with one word.")


def jobs(notes: str) -> list[str]:
    """The job in each sentence of ``notes``, in the model's words."""
    model = ChatOpenAI(
        model=os.environ.get("OPENAI_MODEL", "policy"),
        temperature=float(os.environ.get("STAFF_TEMPERATURE", "1.0")),
        max_tokens=8,
        timeout=600,
        max_retries=1,
    )
    note, job = EXAMPLE
    conversation: list[BaseMessage] = [question(note), AIMessage(job)]
    found = []
    for note in notes.split(". "):
        conversation.append(question(note.rstrip(".")))
        reply = model.invoke(conversation)
        conversation.append(reply)
        found.append(" ".join(reply.text.split()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes")
    try:
        found = jobs(parser.parse_args().notes)
    except OpenAIError as error:
        print(f"the model did not answer: {error}", file=sys.stderr)
        return 1
    print(" | ".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
