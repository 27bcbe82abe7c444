"""Markdown of replies as HTML, with code highlighted, and without anything a page could load."""

from __future__ import annotations

import re
from html import escape
from typing import Final

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

LONGEST: Final = 100_000
"""Maximum characters that are rendered; a longer text is shown as it is."""
_CODE: Final = re.compile(r"`([^`]+)`")
_FORMATTER: Final = HtmlFormatter(nowrap=True)


def _highlighted(code: str, language: str, _: str) -> str:
    """Return code with its tokens in spans, or "" for a language that is not known."""
    try:
        return str(highlight(code, get_lexer_by_name(language), _FORMATTER))
    except ClassNotFound:
        return ""


_RENDERER: Final = (
    MarkdownIt("commonmark", {"html": False, "breaks": True, "highlight": _highlighted})
    .enable(["table", "strikethrough"])
    .disable(["image"])
)


def markdown(text: str) -> str:
    """Return a text as HTML. HTML in it is shown as text, and images as they are written.

    A text that is too long is shown as it is.
    """
    if len(text) > LONGEST:
        return f'<div class="text">{escape(text)}</div>'
    return str(_RENDERER.render(text))


def with_code(text: str) -> str:
    """Return a line of text as HTML, with what is between backticks as code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))
