"""Provider wire APIs as pure translators: bytes in, canonical request out; events in, bytes out.

Each provider has a folder with the same parts: ``request`` and ``history`` (what a client sends),
``reply`` and ``stream`` (what it gets). ``registry`` puts them together as the dialects.
"""
