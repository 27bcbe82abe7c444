"""The option ``--rules``, which selects the sampled tokens that a command trains."""

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
    """Return the rules in a value of ``--rules``. End the command if they cannot be read.

    With ``imitation``, tokens are trained whatever they were drawn from. With ``messages``, replies
    are written as messages, which hold images as they are, so that an image is no reason to leave a
    reply out. ``samplers`` and ``media`` in the value itself take precedence.
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
