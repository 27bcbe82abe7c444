"""The runners of unmodified agents on tasks.

Adapters start agents, sandboxes hold them, and verifiers score them.

:mod:`bridle.harnesses.rollout` runs many sessions at once and speaks HTTP to the proxy.
"""
