"""Text for the demo's tokenizer: the recorded conversations of the agent, as they are rendered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bridle.engine.contract.tokenizer import Tokenizer


def first_corpus(agent_source: str) -> Iterator[str]:
    """Yield text for the tokenizer of the first recording.

    Any text would do; the agent's own source keeps prompts short.
    """
    yield agent_source


def recorded_corpus(conversations: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the conversations of an exported chat JSONL file, as the template renders them."""
    with conversations.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield tokenizer.render(
                record["messages"], record.get("tools"), add_generation_prompt=False
            )
