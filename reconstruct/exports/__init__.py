"""Recorded sessions as training files for other tools.

``selection`` chooses the sessions and reports; ``lines`` and ``parquet`` write; each other module
is one format (``formats`` names them all), and ``card`` describes a written file.
"""
