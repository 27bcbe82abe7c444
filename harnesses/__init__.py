"""Runs unmodified agents on tasks: adapters start them, sandboxes hold them, verifiers score them.

:mod:`bridle.harnesses.rollout` runs many sessions at once and speaks HTTP to the proxy.
"""
