"""The room for people who look at recorded sessions.

It has pages of sessions with their figures (``pages.py``), a session's turns (``transcript.py``),
findings about a session or a run (``facts.py``, ``findings/``) and a comparison of the builders
(``ablation.py``).

It reads the store and the loaded sessions of ``reconstruct``. Nothing here decides which tokens are
trained, and a recorder or a training run needs none of it.
"""
