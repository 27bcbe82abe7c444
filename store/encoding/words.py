"""The words of a text, by which sessions are found.

A word is a run of letters and digits in lower case; everything else only separates words. Each
character of Chinese, Japanese and Korean is a word of its own, because these are written without
spaces. Both databases index the same words, which are made here, and look for the words of a query
as a phrase.
"""

from __future__ import annotations

import re
from typing import Final

_LONGEST: Final = 64
"""Characters of a word that are kept."""
_IDEOGRAPHS: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_SPACES: Final = {at: " " for at in range(128) if not chr(at).isalnum()}
_WORD: Final = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
_ESCAPE: Final = re.compile(r'\\+(?:u[0-9a-fA-F]{4}|[bfnrt"/])?')
_BEGINNING: Final = 3
"""Minimum characters of a last word that also stands for longer words."""


def words_of(text: str, *, json: bool = False) -> list[str]:
    """Return the words of a text; of its strings and names if it is ``json``."""
    if json:
        text = _ESCAPE.sub(" ", text)
    text = text.lower()
    # Five times as fast as the pattern, and most texts are so.
    words = text.translate(_SPACES).split() if text.isascii() else _WORD.findall(text)
    if max(map(len, words), default=0) > _LONGEST:
        return [word[:_LONGEST] for word in words]
    return words


def open_ended(text: str) -> bool:
    """Return whether the last word of a query also stands for the longer words that begin so.

    It does not if it is very short, or if something follows it.
    """
    words = words_of(text)
    return bool(words) and len(words[-1]) >= _BEGINNING and words_of(text[-1:]) != []
