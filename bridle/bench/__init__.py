"""Measurements behind ``bridle bench``: what Bridle costs, beside what it stands in for."""
