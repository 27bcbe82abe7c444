"""Adapters, tasks, verifiers, sandboxes and the rollout runner. Speaks HTTP to the proxy."""
