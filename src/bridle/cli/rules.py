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


def sample_rules(text: str, *, imitation: bool = False) -> SampleRules:
    """The rules in a value of ``--rules``; ends the command when they cannot be read.

    ``imitation``: tokens are trained whatever they were drawn from, unless the value has
    ``samplers``.
    """
    from bridle.reconstruct.samples.rules import SampleRules

    try:
        plain = Path(text).read_bytes() if not text.lstrip().startswith("{") else text
        given = orjson.loads(plain)
        return SampleRules.from_data({"samplers": "any", **given} if imitation else given)
    except (OSError, TypeError, ValueError) as error:
        fail(f"--rules: {error}", 2)
