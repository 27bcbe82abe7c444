"""Measurements behind ``bridle bench``: each module finds the figures of one command."""
