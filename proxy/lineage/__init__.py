"""The search for the earlier call of its session that a request continues.

``turn`` has the recorded calls and their index, ``digests`` compares messages by meaning, however
they are written, ``search`` finds the call that a request continues, and ``rewritten`` finds it if
the history was edited, cut or summarised. The package is pure: it uses no I/O and no clocks.
"""
