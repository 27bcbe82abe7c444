"""Measurements behind ``bridle bench``: each module prints the figures that an issue is judged by."""
