"""Adapters, tasks, verifiers, runtimes and the rollout runner. Speaks HTTP to the proxy."""
