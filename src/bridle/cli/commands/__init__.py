"""The commands of the ``bridle`` program, one file for each."""
