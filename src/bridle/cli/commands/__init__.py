"""One file per command of the ``bridle`` program."""
