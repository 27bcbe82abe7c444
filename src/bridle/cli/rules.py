"""The option ``--rules``: which sampled tokens a command trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from bridle.cli.terminal import fail

if TYPE_CHECKING:
    from bridle.reconstruct.samples.rules import SampleRules

RulesOption = Annotated[
    str,
    typer.Option(
        "--rules", help='Which replies are trained: JSON or a file, such as {"parse_failed": false}'
    ),
]


def sample_rules(text: str, *, imitation: bool = False, messages: bool = False) -> SampleRules:
    """The rules in a value of ``--rules``; ends the command when they cannot be read.

    ``imitation``: tokens are trained whatever they were drawn from. ``messages``: replies are
    written as messages, which hold images as they are, so that these are no reason to leave a reply
    out. The value's own ``samplers`` and ``media`` come first.
    """
    from bridle.reconstruct.samples.rules import SampleRules

    try:
        plain = Path(text).read_bytes() if not text.lstrip().startswith("{") else text
        given = orjson.loads(plain)
        defaults: dict[str, object] = {"samplers": "any"} if imitation else {}
        if messages:
            defaults["media"] = True
        return SampleRules.from_data({**defaults, **given})
    except (OSError, TypeError, ValueError) as error:
        fail(f"--rules: {error}", 2)
