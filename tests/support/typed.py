"""Commands of a page, as a reader types them."""

from __future__ import annotations

import re

WAIT = "timeout 60 sh -c 'until curl -sf -o /dev/null {}; do sleep 0.2; done'"


def console_blocks(text: str) -> list[str]:
    return re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
