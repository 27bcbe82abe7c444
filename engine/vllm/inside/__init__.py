"""Modules that run inside vLLM's own process, in an environment where bridle is not installed.

They import nothing of bridle, except that ``bridle_calls`` loads its readers of markup from the
files around it. ``bridle_start`` starts vLLM.
"""
