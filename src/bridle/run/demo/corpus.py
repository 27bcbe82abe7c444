"""Text for the demo's tokenizer: what the agent really sends, recorded and rendered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bridle.engine.contract.tokenizer import Tokenizer


def first_corpus(agent_source: str) -> Iterator[str]:
    """For the tokenizer that serves the first recording: any will do, this one is not wasteful."""
    yield agent_source


def recorded_corpus(conversations: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """The conversations of an exported chat JSONL file, rendered by the template."""
    with conversations.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield tokenizer.render(
                record["messages"], record.get("tools"), add_generation_prompt=False
            )
