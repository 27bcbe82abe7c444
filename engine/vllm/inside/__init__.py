"""Modules that run inside vLLM's own process, in an environment where bridle is not installed.

They import nothing of bridle. ``bridle_start`` is what vLLM is started by.
"""
