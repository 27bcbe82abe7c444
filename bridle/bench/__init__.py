"""Measurements of our own, each printed by ``bridle bench NAME``."""
