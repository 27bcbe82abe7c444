"""The room of whole courses that use the library as a program of its own would.

``demo/`` and ``reproduce/`` train an agent from nothing and report how well it learned.
``learning/`` measures which estimators and losses learn in fewer sessions. ``models/`` has the
policies that these, the tests and the benchmarks start from.

Only the command line imports this room (``lint-imports``); tests and benchmarks may.
"""
