"""The command line, built on :mod:`bridle.run`: options, output and one file per command.

It may import every room; no room imports it.
"""
