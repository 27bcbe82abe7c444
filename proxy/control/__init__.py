"""The control API under ``/bridle/v1``, health and metrics: for rollouts, trainers, operators.

Its framework is loaded when the first control request comes.
"""
