"""The control API under ``/bridle/v1``, and the health and metrics routes.

Rollouts, trainers and operators use it. FastAPI is imported at the first control request.
"""
