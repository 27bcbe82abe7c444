"""Bridle: command line, configuration and wiring. May import every other room."""
