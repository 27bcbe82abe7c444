"""Which earlier call of its session a request continues, and how that is known.

``turn`` has the recorded calls and their index, ``digests`` what messages say whatever way they are
written, ``search`` finds the call that a request continues, and ``rewritten`` finds it where the
history was edited, cut or summarised. Pure: no I/O, no clocks.
"""
