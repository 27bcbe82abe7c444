"""Arrays and bodies as bytes of the database.

``packing.py`` packs token ids, logprobs and JSON; ``bodies.py`` keeps requests and responses byte
for byte, compressed against the message columns.
"""
