"""The entry point of ``python -m bridle``, which is the ``bridle`` command."""

from bridle.cli.program import app

app()
