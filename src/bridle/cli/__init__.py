"""The command line: options, output and one file per command, over what :mod:`bridle.run` does.

It may import every room; no room imports it.
"""
