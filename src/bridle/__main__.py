"""``python -m bridle`` is the ``bridle`` command."""

from bridle.cli.program import app

app()
