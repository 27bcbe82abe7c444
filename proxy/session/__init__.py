"""The session that a request belongs to, and the recorded call that it continues.

One question is answered here: which call does this one continue, and with which tokens. Two data
structures hold what that needs: the session in memory (``session``), and its token tree
(:mod:`bridle.store.tree`). Everything in them can be read again from the store.

- ``registry`` admits requests, by their ``keys`` or by the headers of the harness
  (``harness_identity``), and ``rules`` applies a session's own settings
- ``memory`` has all sessions within one budget of bytes; ``loading`` fills them from the store
- ``turn`` has the recorded calls and their index, and ``digests`` compares messages by meaning,
  however they are written
- ``folded_turns`` puts turns that a client folded into others back in order
- ``search`` finds the call that a request continues; ``rewritten`` finds it if the history was
  edited, cut or summarised, and ``match`` compares an echo with a recorded reply

What a call was for, whether it repeats another and why its tokens broke is judged from the record.
"""
