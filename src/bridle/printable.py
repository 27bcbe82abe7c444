"""Make recorded text safe to print on a terminal.

Text that models, tools and agents write may contain control characters. A terminal obeys them: they
move the cursor, set the window's title or the clipboard, hide text, or reverse its direction.
"""

from __future__ import annotations

from typing import Final

_PICTURES: Final = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
"""The Unicode symbols of the C0 control characters and DEL, such as ␛ for ESC."""
_HIDDEN: Final = (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""The C1 control characters (0x9B starts a sequence, as ESC [ does), and those that reverse
text."""
_VISIBLE: Final = _PICTURES | {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN
}
_IN_LINES: Final = {code: shown for code, shown in _VISIBLE.items() if chr(code) not in "\n\t"}


def printable(text: str, *, one_line: bool = False) -> str:
    """Return ``text`` with every control character made visible.

    Line breaks and tabs are kept, unless ``one_line`` is set.
    """
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_VISIBLE if one_line else _IN_LINES)
