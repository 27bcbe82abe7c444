"""Markup in replies: tool calls and reasoning are taken out of a reply's text as it arrives.

Each markup that our own engines read has a module with its grammar; ``readers`` finds the grammar
for the markup of a model's template.
"""

from bridle.engine.serve.markup.readers import READ, ReplyMarkup, reader, reply_markup
from bridle.engine.serve.markup.reading import MarkupReader
from bridle.engine.serve.markup.thinking import ThinkingParser

__all__ = ["READ", "MarkupReader", "ReplyMarkup", "ThinkingParser", "reader", "reply_markup"]
