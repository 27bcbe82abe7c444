"""An export format for people: conversations as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridle.reconstruct.exports.formats import of_rows
from bridle.reconstruct.exports.lines import ExportedConversation
from bridle.reconstruct.exports.messages import text


def markdown_rows(exported: ExportedConversation) -> Iterator[dict[str, str]]:
    """Yield a row for each message of a conversation."""
    exported.require_messages()
    for each in exported.messages:
        yield {"role": str(each.message["role"]), "text": text(each.message)}


def markdown(row: Mapping[str, Any]) -> bytes:
    """Return a message as a paragraph."""
    return f"**{row['role']}:** {row['text']}\n\n".encode()


FORMAT = of_rows(markdown_rows, markdown, heading=b"# Conversations\n\n", suffix=".md")
