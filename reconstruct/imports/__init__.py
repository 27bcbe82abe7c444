"""Conversations that something else recorded, as sessions of the store.

A format reads a file as :class:`~bridle.reconstruct.imports.turns.ImportedSession` values
(``formats.py`` lists them), and ``writing.py`` records these. Imported sessions are text: they have
no token ids, so they are exported and fine-tuned on, and never trained by reinforcement learning.
"""
