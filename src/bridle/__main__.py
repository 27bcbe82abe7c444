"""``python -m bridle`` is the ``bridle`` command."""

from bridle.cli import app

app()
