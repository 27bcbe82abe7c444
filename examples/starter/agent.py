"""The agent that is trained. Put your own here: any program that calls a model over HTTP.

Bridle starts it once for each session, as `python agent.py PROMPT`, with the session's address in
OPENAI_BASE_URL (ANTHROPIC_BASE_URL and GOOGLE_GEMINI_BASE_URL are set as well). What it prints is
the answer that the verifier reads. It may call the model as often as it likes, use tools, and run
programs in its own folder.
"""

import os
import sys

import httpx


def ask(prompt: str) -> str:
    """Return the model's reply. An SDK such as `openai` does the same."""
    reply = httpx.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        json={
            "model": "policy",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 12,
        },
        timeout=60,
    )
    return reply.raise_for_status().json()["choices"][0]["message"]["content"]


print(ask(sys.argv[1]))
